"""Serves a model twice, with a 2-bit KV cache and with a BF16 one in the same memory, and shows both side by side.

./demo prepares an environment without a GPU and a small model first. On a GPU node that has SGLang and this
plugin, run it directly:  python -m launch.demo --model Qwen/Qwen3-8B
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from launch import demo_episodes
from launch import model as small_model
from launch.progress import StepFailed, step
from launch.server import Server, ServerError
from sglang_kvq.methods import METHOD_NAMES

SHORT = "How many days are in a week?"
#: Longer than the BF16 windows (64 + 256 tokens by default), so most of it is read back from 2 bits.
PASSAGE = (
    "The lighthouse on Gull Rock was built in 1874 by Anna Berg, who paid for it with the profits of her sawmill. "
    "It stands on a reef two miles from the harbour, and for sixty years its lamp was lit by hand every evening. "
    "The first keeper, a quiet man called Olaf Lind, kept a diary of the weather and of the ships that went by. "
    "He wrote of storms that shook the tower, of whales in the spring, and of a white cat that came ashore on a plank. "
    "In winter the keeper lived on salted fish and bread, and in summer his sister rowed out with fresh milk and news. "
    "When electricity reached the reef in 1934 the lamp was changed, and the keeper moved back to the town. "
)
LONG = PASSAGE * 4 + "\n\nQuestion: who built the lighthouse on Gull Rock, and in which year?"


@dataclass
class Result:
    """One server's answers, memory and tokens; ``kv_quant`` has the fields of its ``/server_info``."""

    memory_gb: float | None
    tokens: int
    kv_quant: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)


def describe(server: Server) -> Result:
    info = server.info()
    state = (info.get("internal_states") or [{}])[0]
    memory = state.get("memory_usage") or {}
    return Result(memory.get("kvcache"), info.get("max_total_num_tokens") or memory.get("token_capacity") or 0)


def ask(server: Server, result: Result) -> None:
    for name, question in (("short", SHORT), ("long", LONG)):
        answer = result.answers[name] = server.chat(question, max_tokens=40)
        if not answer.strip():
            raise ServerError(
                f"the server answered nothing to the {name} question; please report this with {server.log_path}"
            )


def start(server: Server, title: str) -> Server:
    with step(f"starting a server: {title}"):
        return server.start(timeout=900)


def table(method: str, plain: Result, kvq: Result) -> Table:
    """Builds the comparison. A figure that the server does not report shows as a dash, never as a guess."""

    def number(value: Any, form: str = ",") -> str:
        return "–" if value is None else format(value, form)  # noqa: RUF001  (a dash in a table)

    status = kvq.kv_quant
    out = Table(title="The same memory, two KV caches", show_lines=True)
    for heading in ("", "BF16", f"--kv-quant {method}"):
        out.add_column(heading, overflow="fold")
    out.add_row("KV cache memory, GB", number(plain.memory_gb), number(kvq.memory_gb))
    fit = status.get("tokens", kvq.tokens)
    out.add_row("tokens that fit", number(plain.tokens), f"{number(fit)} ({fit / max(plain.tokens, 1):.1f} times)")
    out.add_row("allocated bits per element", "16", number(status.get("bits_per_element"), ".2f"))
    for tier, tokens in (status.get("tiers") or {}).items():
        out.add_row(f"held after the questions: {tier.replace('_', ' ')}", "", number(tokens))
    questions = {"short": SHORT, "long": "four times a passage, then: who built the lighthouse, and in which year?"}
    for name, question in questions.items():
        out.add_row(
            f"{name} question\n{question}",
            *(escape(result.answers[name].strip()) for result in (plain, kvq)),
        )
    return out


def run(options: argparse.Namespace, console: Console) -> None:
    cpu = not gpu_present()
    model = options.model or str(small_model.ensure())
    if options.episodes:
        demo_episodes.run(model, options.method, options.flags, cpu, console)
        return
    # On a CPU this is a share of the machine's free memory; a tenth is enough to show the difference.
    memory = ["--mem-fraction-static", "0.1"] if cpu else []
    with ExitStack() as servers:
        kvq_server = Server(model, "--kv-quant", options.method, *memory, *options.flags, cpu=cpu)
        servers.callback(kvq_server.stop)
        start(kvq_server, f"--kv-quant {options.method}")
        with step("asking it two questions"):
            kvq = describe(kvq_server)
            ask(kvq_server, kvq)
            kvq.kv_quant = kvq_server.kv_quant()
        if not options.serve:
            kvq_server.stop()

        # As many tokens as fit in BF16 into the bytes that the first server used.
        same = kvq.kv_quant.get("bf16_tokens_same_memory")
        memory = ["--mem-fraction-static", "0.3"] if cpu else []
        limit = ["--max-total-tokens", str(same)] if same else []
        plain_server = Server(model, "--kv-quant", "none", *memory, *limit, *without_ours(options.flags), cpu=cpu)
        servers.callback(plain_server.stop)
        start(plain_server, "BF16, as many tokens as fit in the same memory")
        with step("asking it the same"):
            plain = describe(plain_server)
            ask(plain_server, plain)
        plain_server.stop()

        console.print(table(options.method, plain, kvq))
        if options.serve:
            wait(kvq_server, console)


def without_ours(flags: list[str]) -> list[str]:
    """Returns the flags that a plain server takes too: all but ``--kv-quant-…``, each of which has one value."""
    kept, ours = [], False
    for word in flags:
        if word.startswith("--"):
            ours = word.startswith("--kv-quant-")
        if not ours:
            kept.append(word)
    return kept


def wait(server: Server, console: Console) -> None:
    """Keeps the server running until Ctrl-C."""
    curl = (
        f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"""  -d '{{"model": "default", "messages": [{{"role": "user", "content": "{SHORT}"}}]}}'"""
    )
    console.print(Panel.fit(f"{server.url} is up, log in {server.log_path}\nCtrl-C stops it."))
    print(curl, flush=True)  # outside the panel, so that it can be copied
    while server.running:
        time.sleep(0.5)
    raise ServerError(f"the server ended by itself\n{server.log_tail()}")


def gpu_present() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="leave the 2-bit server up and print a curl line")
    parser.add_argument(
        "--episodes",
        action="store_true",
        help="compare a long conversation, of which each request reads only a part, with the full cache",
    )
    parser.add_argument(
        "--method", choices=METHOD_NAMES, default="oscar", help="value of --kv-quant (default: %(default)s)"
    )
    parser.add_argument("--model", help="folder or hub name (default: SmolLM2-135M-Instruct, fetched once)")
    parser.add_argument("flags", nargs="*", help="after --: more flags; --kv-quant-… for one server, SGLang's for both")
    options = parser.parse_args()
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds like Ctrl-C, so that servers stop
    begin = time.monotonic()
    try:
        run(options, console)
    except (ServerError, StepFailed) as error:
        console.print("[red]The demo failed[/red]")
        sys.exit(str(error))
    except KeyboardInterrupt:
        console.print("stopped")
        sys.exit(130)
    console.print(f"done in {time.monotonic() - begin:.0f} s; ./demo --serve keeps the server up")


if __name__ == "__main__":
    main()
