"""Speculative decoding: greedy answers with drafts are those without, token for token, except where two tokens tie.

One server without drafts answers everything twice, in batches of different sizes, and reads its answers at the end of
a prompt, as drafts are verified: how often its own choices part, and by how much the distance of the two likeliest
tokens changes, is what rounding does, and bounds the rest. (Where experts are chosen, rounding may choose others, and a
distance changes by much, rarely.) Servers with drafts read theirs too. Drafts come from what was said before (NGRAM: a
mask for each request) or from a model (STANDALONE: the served one itself, whose chain is mostly accepted; beside
windows or states a small one that says the last token again).
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

#: None, and two ways to draft; a checkpoint with a layer for it has a third, ``nextn``.
WAYS = ("none", "ngram", "standalone")
#: Two tokens whose log-probabilities are nearer may be exchanged by BF16's rounding alone (``families.ROUNDING``).
TIE = 0.2
PHRASE = 9
#: Three drafts after the last token.
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")


@dataclass(frozen=True)
class Scale:
    """Prompts, tokens of each answer, and requests at once: all of a batch, or few.

    Attributes:
        noise: prompts of either kind, the first, that show how much answers without drafts differ among themselves.
    """

    short: int
    long: int
    answer: int
    batch: int
    few: int
    noise: int


GPU = Scale(short=850, long=150, answer=32, batch=64, few=5, noise=200)
FEW = replace(GPU, short=170, long=30)  # of all models, in 8 minutes
CPU = Scale(short=3, long=1, answer=12, batch=4, few=1, noise=3)


def flags(way: str, draft: Path) -> list[str]:
    """Of a server; draft: the checkpoint that drafts for STANDALONE."""
    if way == "ngram":
        return [
            *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
            *("--speculative-num-draft-tokens", "5"),
        ]
    if way == "nextn":  # a layer of the checkpoint's own
        return ["--speculative-algorithm", "NEXTN", *CHAIN]
    if way == "standalone":
        return [
            *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft), *CHAIN),
        ]
    return []


def write_echo(folder: Path) -> Path:
    """A draft model with nothing but a KV cache: its guess is the last token again, so that it needs to know nothing of
    the model that it drafts for."""
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
    """Phrases that come back, of lengths around those given, so that answers cross pages at every token."""
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
        tokens: of each prompt.
        tops: a server without drafts: the likeliest at every step.
        again: and of the first ``Scale.noise`` the same in small batches.
        read: log-probabilities of what a server finds likely at each token of its answers to these, given as prompts.
        accepted: tokens of a verification, on average; 1 without drafts.
        left: what is still held when all has ended.
    """

    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    again: dict[str, list[list[Step]]] = field(default_factory=dict)
    tops: dict[str, list[list[Step]]] = field(default_factory=dict)
    read: dict[str, list[list[dict[int, float]]]] = field(default_factory=dict)
    accepted: float = 1.0
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0


def ask(server: TinyServer, scale: Scale, lengths: dict[str, Sequence[int]], way: str) -> Said:
    """All prompts, in batches; then everything must be given back."""
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
        if kind == "short":  # reading an answer at once finds less of a longer one's prompt in BF16 than writing it
            said.read[kind] = read(server, some, said.tokens[kind], scale.batch)
    said.accepted = generated / verified if verified else 1.0
    said.left = server.held_when_empty()
    said.seconds = time.monotonic() - begin
    return said


def read(server: TinyServer, asked: list[list[int]], answers: list[list[int]], size: int) -> list[list[dict]]:
    """Log-probabilities of the likeliest at every token of answers that follow their prompts, ``size`` at once."""
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
    """By how much the first is likelier; what is not listed is no likelier than what is."""
    least = min(top.values())
    return top.get(first, least) - top.get(second, least)


def parted(want: list[list[int]], tops: list[list[Step]], got: list[list[int]]) -> Difference:
    """mean: share of answers that part; max: the largest distance of the two likeliest tokens at which one does."""
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
    """By how much the distance of a step's two likeliest tokens differs at most between answers that begin alike.

    others: of each answer the likeliest at every step that has the same tokens before it.
    """
    return max(
        abs(distance(step.top, *pair) - distance(other, *pair))
        for steps_of, others_of in zip(answers, others, strict=True)
        for step, other in zip(steps_of, others_of)
        for pair in [two_likeliest(step.top)]
    )


def alike(answers: list[list[Step]], others: list[list[Step]]) -> list[list[dict[int, float]]]:
    """Of others the likeliest at every step up to the first at which they choose differently, that one too."""
    found = []
    for ours, theirs in zip(answers, others, strict=True):
        same = next((n for n, (a, b) in enumerate(zip(ours, theirs)) if a.token != b.token), len(theirs))
        found.append([step.top for step in theirs[: same + 1]])
    return found


def misread(answers: list[list[int]], tops: list[list[dict[int, float]]]) -> Difference:
    """mean: share of tokens that are not the likeliest to whoever reads the answers; max: how much likelier that is."""
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
    """(case, passed, difference, bound, more) of one way to draft, which shall give ``least`` tokens a step."""
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
        # Which page is a record may change up to a round of drafts earlier: in 4 bits a little more than rounding.
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
