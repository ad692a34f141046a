"""Speculative decoding: greedy answers equal those without drafts, token for token, except where two tokens tie.

One server without drafts answers everything twice, in batches of different sizes. It also reads its answers at the end
of a prompt, as drafts are verified. Two effects of rounding follow, which bound the rest: how often its own choices
differ, and by how much the distance of the two likeliest tokens changes. (In a mixture of experts, rounding may choose
other experts; then, rarely, a distance changes by much.) Servers with drafts read their answers too.

Drafts come from earlier tokens (NGRAM: a mask for each request) or from a model (STANDALONE). That is the served model
itself, whose chain is mostly accepted. For models with windows or states it is a small one that repeats the last token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.answers import TOP, Bound, Difference, Step, greedy, steps
from benchmarks.tiny_models import MODELS, VOCABULARY
from benchmarks.tiny_server import TinyServer, body

#: No drafts, and two ways to draft; a checkpoint with a layer for drafts has a third way, ``nextn``.
WAYS = ("none", "ngram", "standalone")
#: Largest distance of two log-probabilities whose tokens BF16's rounding alone may exchange (``families.ROUNDING``).
TIE = 0.2
PHRASE = 9
#: Three drafts after the last token.
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")


@dataclass(frozen=True)
class Scale:
    """Numbers of prompts, tokens of each answer, and requests at once: in large batches and in small ones.

    Attributes:
        noise: how many of the first prompts of either kind show the differences among answers without drafts.
    """

    short: int
    long: int
    answer: int
    batch: int
    few: int
    noise: int


GPU = Scale(short=850, long=150, answer=32, batch=64, few=5, noise=200)
FEW = replace(GPU, short=170, long=30)  # all models run within 8 minutes
CPU = Scale(short=3, long=1, answer=12, batch=4, few=1, noise=3)


def flags(way: str, draft: Path) -> list[str]:
    """Returns a server's flags; ``draft``: the checkpoint that drafts for STANDALONE."""
    if way == "ngram":
        return [
            *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
            *("--speculative-num-draft-tokens", "5"),
        ]
    if way == "nextn":  # the checkpoint's own layer
        return ["--speculative-algorithm", "NEXTN", *CHAIN]
    if way == "standalone":
        return [
            *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft), *CHAIN),
        ]
    return []


def write_echo(folder: Path) -> Path:
    """Writes a draft model with nothing but a KV cache that always guesses the last token again.

    So it needs no knowledge of the model for which it drafts.
    """
    target = replace(MODELS["qwen3"], name="echo").write(folder)
    path = target / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return target


def prompts(scale: Scale, lengths: Sequence[int], count: int, kind: str) -> list[list[int]]:
    """Returns prompts of recurring phrases, of about the given lengths, so that answers cross pages at any token."""
    found = []
    for n in range(count):
        rng = random.Random(f"{kind} {n}")
        phrases = [[rng.randrange(2, VOCABULARY) for _ in range(PHRASE)] for _ in range(5)]
        length = lengths[n % len(lengths)] - rng.randrange(64)
        tokens = [token for _ in range(-(-length // PHRASE)) for token in rng.choice(phrases)]
        found.append(tokens[:length])
    return found


@dataclass
class Said:
    """Answers of one server by kind of prompt, ``short`` or ``long``.

    Attributes:
        tokens: the answers to all prompts.
        tops: of a server without drafts: the likeliest tokens at every step.
        again: of a server without drafts: the answers to the first ``Scale.noise`` prompts in small batches.
        read: log-probabilities of the likeliest tokens at each token of these answers, given as prompts.
        accepted: average number of tokens per verification; 1 without drafts.
        left: what the server still holds at the end.
    """

    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    again: dict[str, list[list[Step]]] = field(default_factory=dict)
    tops: dict[str, list[list[Step]]] = field(default_factory=dict)
    read: dict[str, list[list[dict[int, float]]]] = field(default_factory=dict)
    accepted: float = 1.0
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0


def ask(server: TinyServer, scale: Scale, lengths: dict[str, Sequence[int]], way: str) -> Said:
    """Sends all prompts in batches; afterwards the server must hold nothing."""
    begin, said = time.monotonic(), Said()
    counts = {"short": scale.short, "long": scale.long}
    generated = verified = 0
    for kind, count in counts.items():
        asked = prompts(scale, lengths[kind], count, kind)

        def replies(size: int, asked: list[list[int]]) -> list[dict]:
            found = []
            for at in range(0, len(asked), size):
                batch = asked[at : at + size]
                if way == "none":
                    found += greedy(server, batch, scale.answer)
                else:
                    found += server.json("/generate", body(batch, scale.answer), timeout=180)
            return found

        all_at_once, some = replies(scale.batch, asked), asked[: scale.noise]
        said.tokens[kind] = [reply["output_ids"] for reply in all_at_once]
        if way == "none":
            said.tops[kind] = [steps(reply) for reply in all_at_once]
            said.again[kind] = [steps(reply) for reply in replies(scale.few, some)]
        else:
            generated += sum(reply["meta_info"]["completion_tokens"] for reply in all_at_once)
            verified += sum(reply["meta_info"]["spec_verify_ct"] for reply in all_at_once)
        if kind == "short":  # for long prompts, reading an answer finds less of the prompt in BF16 than writing it
            said.read[kind] = read(server, some, said.tokens[kind], scale.batch)
    said.accepted = generated / verified if verified else 1.0
    said.left = server.held_when_empty()
    said.seconds = time.monotonic() - begin
    return said


def read(server: TinyServer, asked: list[list[int]], answers: list[list[int]], size: int) -> list[list[dict]]:
    """Returns log-probabilities of the likeliest tokens at each token of answers after prompts, ``size`` at once."""
    found = []
    for at in range(0, len(asked), size):
        pairs = list(zip(asked[at : at + size], answers[at : at + size]))
        begins = [len(prompt) - 1 for prompt, _ in pairs]
        whole = body([p + a for p, a in pairs], 1, return_logprob=True, logprob_start_len=begins, top_logprobs_num=TOP)
        for reply in server.json("/generate", whole, timeout=180):
            tops = reply["meta_info"]["input_top_logprobs"][1:]
            found.append([{token: logprob for logprob, token, *_ in top} for top in tops])
    return found


def two_likeliest(top: dict[int, float]) -> list[int]:
    return sorted(top, key=lambda token: -top[token])[:2]


def distance(top: dict[int, float], first: int, second: int) -> float:
    """Returns by how much ``first`` is likelier; an unlisted token counts as the least likely listed one."""
    least = min(top.values())
    return top.get(first, least) - top.get(second, least)


def parted(want: list[list[int]], tops: list[list[Step]], got: list[list[int]]) -> Difference:
    """Compares answers: mean is the share that differ, max the two likeliest tokens' largest distance at that point."""
    gaps = []
    for a, b, steps_of in zip(want, got, tops, strict=True):
        if len(a) != len(b):
            gaps.append(float("inf"))
        for x, y, step in zip(a, b, steps_of):
            if x != y:
                gaps.append(distance(step.top, *two_likeliest(step.top)))
                break
    return Difference(len(gaps) / max(len(want), 1), max(gaps, default=0.0), len(want))


def changed(answers: list[list[Step]], others: list[list[dict[int, float]]]) -> float:
    """Returns the largest change, between answers that begin equally, of the distance of a step's two likeliest tokens.

    Args:
        others: for each answer, the likeliest tokens at every step that has the same tokens before it.
    """
    return max(
        abs(distance(step.top, *pair) - distance(other, *pair))
        for steps_of, others_of in zip(answers, others, strict=True)
        for step, other in zip(steps_of, others_of)
        for pair in [two_likeliest(step.top)]
    )


def alike(answers: list[list[Step]], others: list[list[Step]]) -> list[list[dict[int, float]]]:
    """Returns the likeliest tokens of ``others`` up to and including the first step at which the choices differ."""
    found = []
    for ours, theirs in zip(answers, others, strict=True):
        same = next((n for n, (a, b) in enumerate(zip(ours, theirs)) if a.token != b.token), len(theirs))
        found.append([step.top for step in theirs[: same + 1]])
    return found


def misread(answers: list[list[int]], tops: list[list[dict[int, float]]]) -> Difference:
    """Compares answers with a reading: mean is the share of tokens that are not likeliest, max the largest distance."""
    gaps = [
        distance(top, two_likeliest(top)[0], token)
        for answer, tops_of in zip(answers, tops, strict=True)
        for token, top in zip(answer, tops_of, strict=True)
    ]
    wrong = [gap for gap in gaps if gap > 0]
    return Difference(len(wrong) / max(len(gaps), 1), max(wrong, default=0.0), len(gaps))


def compare(
    ours: Said, plain: Said, way: str, least: float = 1.1
) -> Iterator[tuple[str, bool, Difference, Bound, str]]:
    """Yields (case, passed, difference, bound, more) for one way to draft, which must give ``least`` tokens a step."""
    for kind, case in (("short", "all in BF16"), ("long", "int4 history")):
        some = len(plain.again[kind])
        tops, answers, tie = plain.tops[kind][:some], plain.tokens[kind][:some], TIE if kind == "short" else 2 * TIE
        again = [[step.token for step in answer] for answer in plain.again[kind]]
        noise, change = parted(answers, tops, again).mean, changed(tops, alike(tops, plain.again[kind]))
        if kind == "short":
            likeliest = [[two_likeliest(top)[0] for top in answer] for answer in plain.read[kind]]
            noise = max(noise, parted(answers, tops, likeliest).mean)
            change = max(change, changed(tops, plain.read[kind]))
        found = parted(plain.tokens[kind], plain.tops[kind], ours.tokens[kind])
        # Pages may become records up to a round of drafts earlier: in 4 bits that adds a little to rounding.
        more = 0.02 if kind == "short" else 0.1
        bound = Bound(2 * noise + more, max(2 * change, tie))
        said = f"{found.tokens} prompts, {ours.accepted:.2f} tokens a step; without drafts {noise:.4f}, {change:.3f}"
        yield f"drafts ({way}), {case}: answers", bound.holds(found), found, bound, said
        if kind == "short":
            found, usual = (misread(who.tokens[kind][:some], who.read[kind]) for who in (ours, plain))
            bound = Bound(2 * usual.mean + 0.005, bound.max)
            said = f"without drafts: {usual}"
            yield f"drafts ({way}), {case}: answers read", bound.holds(found), found, bound, said
    enough = Difference(ours.accepted, 0.0, 1)
    yield (
        f"drafts ({way}): some are accepted, some not",
        least <= ours.accepted < 5,
        enough,
        Bound(5, 0),
        f"{ours.accepted:.2f} tokens a step",
    )
