"""Writes docs/results/models.md, the tables of architectures, from ``sglang_kvq/sglang/architectures.py``.

    python docs/models.py

``tests/packaging/test_models_page.py`` fails while that page differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kvq.sglang.architectures import FAMILIES, Answer, Evidence, Family, Reason

PAGE = Path(__file__).parent / "results" / "models.md"
#: Begins the page.
HEAD = """# Architectures

`python docs/models.py` writes this page from [architectures.py](../../sglang_kvq/sglang/architectures.py).
[models.md](../models.md) says how to check one model, and what else decides.

"""

#: The paragraph below each heading of *Served*.
EVIDENCE = {
    Evidence.GPU: "`python -m tests.gpu` runs a tiny random model of the architecture on an H200. It compares "
    "log-probabilities with plain SGLang's ([gpu_h200.json](../../benchmarks/results/gpu_h200.json)). `tests/e2e` also "
    "runs Llama on a CPU, with a real model.",
    Evidence.BUILT: "`tests/sglang/test_architectures.py` builds SGLang's class from a config, without weights. It "
    "puts each attention layer through the checks of a starting server. No model was run.",
    Evidence.READ: "The tests' environment cannot build these. The checks accept a config of each. "
    "`tests/sglang/memory/test_pool_users.py` found nothing in their code that the cache does not know. No model was "
    "run.",
}


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return row(*head) + "|---" * len(head) + "|\n" + "".join(row(*cells) for cells in rows)


def named(family: Family) -> tuple[str, str]:
    return family.name, ", ".join(f"`{name}`" for name in family.architectures)


def tables() -> Iterator[str]:
    """Yields the page in pieces."""
    yield HEAD
    counts = {
        answer: sum(len(family.architectures) for family in FAMILIES if family.answer is answer) for answer in Answer
    }
    total = sum(counts.values())
    yield (
        f"| architectures | served | served in part | refused |\n|---|---|---|---|\n"
        f"| {total} | {counts[Answer.SERVED]} | {counts[Answer.IN_PART]} | {counts[Answer.REFUSED]} |\n\n"
    )
    yield "## Served\n\n"
    for evidence in Evidence:
        families = [f for f in FAMILIES if f.answer is Answer.SERVED and f.evidence is evidence]
        yield f"### {evidence.value.capitalize().replace('sglang', 'SGLang').replace('h200', 'H200')}\n\n"
        yield f"{EVIDENCE[evidence]}\n\n"
        yield table(("family", "architectures", "note"), ((*named(family), family.note) for family in families)) + "\n"
    yield "## Served in part\n\nOne class covers checkpoints with and without the refused property.\n\n"
    yield table(
        ("family", "architectures", "served", "refused if it has"),
        ((*named(f), f.note, f.reason.what) for f in FAMILIES if f.answer is Answer.IN_PART and f.reason),
    )
    yield "\n## Refused\n\n"
    reasons: list[Reason] = []
    for family in FAMILIES:
        if family.answer is Answer.REFUSED and family.reason and family.reason not in reasons:
            reasons.append(family.reason)
    for reason in reasons:
        yield f"### {reason.what[0].upper()}{reason.what[1:]}\n\nWhat it would take: {reason.lift}.\n\n"
        families = [f for f in FAMILIES if f.answer is Answer.REFUSED and f.reason is reason]
        yield table(("family", "architectures", "note"), ((*named(family), family.note) for family in families)) + "\n"


def written() -> str:
    """Returns the up-to-date page."""
    return "".join(tables()).rstrip("\n") + "\n"


def main() -> None:
    PAGE.write_text(written())
    print(PAGE)


if __name__ == "__main__":
    main()
