"""Paired KL divergence, top-1 agreement and perplexity on held-out text, through the server's real cache.

The server computes a prompt in chunks (``--chunked-prefill-size``). A chunk attends to the stored keys and values of
earlier chunks. A prompt's log-probabilities therefore show the effect of the quantized history on the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.specs import LARGEST_CHUNK
from sglang_kvq.evaluation.tasks.base import Bench, Outcome, fitting, settings_of, text_tokens
from sglang_kvq.evaluation.tasks.statistics import Distributions, clustered, compare


@dataclass(frozen=True)
class KLTask:
    """Settings of the KL divergence.

    Attributes:
        texts: files to draw contexts from.
        skip: share of each text to leave out at its beginning, which calibration used.
        contexts: (tokens, count) per length, evenly spaced over the texts.
        first: first position measured. With 64 sink and 256 recent tokens in BF16, half of the tokens that position 640
            attends to are quantized, and more at later positions.
        top: K, the number of the reference's likeliest tokens that are compared one by one.
    """

    texts: tuple[Path, ...]
    skip: float = 0.0
    contexts: tuple[tuple[int, int], ...] = ((2048, 8),)
    first: int = 640
    top: int = 64
    name: str = "kl"
    largest_chunk: ClassVar[int] = LARGEST_CHUNK

    def __post_init__(self) -> None:
        if not self.texts:
            raise KVQuantError("the kl task needs held-out text: --text FILE (not what rotations were calibrated on).")
        if not 0 <= self.skip < 1:
            raise KVQuantError(f"--text-skip {self.skip}: must be a share of the text, at least 0 and below 1.")
        if self.top < 2:
            raise KVQuantError(f"--kl-top {self.top}: must be at least 2.")
        for length, count in self.contexts:
            if length <= self.first + 1 or count < 1 or self.first < 1:
                raise KVQuantError(
                    f"--kl-lengths {length}x{count} with --kl-first {self.first}: a context must be longer than the "
                    "first measured position, and there must be at least one."
                )

    def identity(self) -> dict[str, Any]:
        return settings_of(self)

    # -- contexts -----------------------------------------------------------------------------------------

    def draw(self, client: Client, bench: Bench) -> Iterator[tuple[int, int, list[int]]]:
        """Yields the contexts that this server can take: length, number, and token ids ``[length - 1]``.

        The one token that a request generates completes the length.

        Raises:
            KVQuantError: the texts are too short for that many contexts.
        """
        whole = [text_tokens(path, self.skip, client, bench) for path in self.texts]
        begin = bench.material.begin_token(client)
        for length, count in self.contexts:
            if length > client.facts.room:
                continue
            need = length - 1 - len(begin)
            for text, of in enumerate(whole):
                share = count // len(whole) + (text < count % len(whole))
                if share * need > len(of):
                    raise KVQuantError(
                        f"{self.texts[text].name}: {len(of)} tokens after --text-skip {self.skip}, but {share} "
                        f"contexts of {length} need {share * need}. Give more text, fewer or shorter contexts "
                        "(--kl-lengths)."
                    )
                starts = np.linspace(0, len(of) - need, share).astype(int)
                for number, start in enumerate(starts):
                    yield length, text * count + number, [*begin, *of[start : start + need].tolist()]

    def _key(self, length: int, ids: list[int]) -> Any:
        return {"length": length, "ids": ids, "first": self.first, "top": self.top}

    # -- measuring ----------------------------------------------------------------------------------------

    def record_reference(self, client: Client, bench: Bench) -> None:
        """Stores the distributions that all methods are compared with.

        Stored ones are replaced, because the server may have other settings than theirs.
        """

        def record(context: tuple[int, int, list[int]]) -> None:
            length, _, ids = context
            found = Distributions.from_meta(client.prompt_logprobs(ids, self.first, self.top))
            bench.material.store("reference", self._key(length, ids), asdict(found))

        bench.map(record, self.draw(client, bench))

    def run(self, client: Client, bench: Bench) -> Outcome:
        self._check_chunk(client)
        bench.material.reference_settled.wait()
        if bench.material.reference_problem:
            raise KVQuantError(f"nothing to compare with: {bench.material.reference_problem}")
        contexts = list(self.draw(client, bench))
        fit = fitting("--kl-lengths", [length for length, _ in self.contexts], client)
        left_out = [length for length, _ in self.contexts if length not in fit]

        def measure(context: tuple[int, int, list[int]]) -> dict[str, Any]:
            length, number, ids = context
            stored = bench.material.load("reference", self._key(length, ids))
            if stored is None:
                raise KVQuantError(
                    f"no BF16 distributions of context {number} of {length} tokens in {bench.material.folder.name}: "
                    "run the method none with these settings first, or give --reference-server URL."
                )
            # Twice as many as are compared, because another server ranks them differently.
            found = Distributions.from_meta(client.prompt_logprobs(ids, self.first, 2 * self.top))
            result = compare(Distributions(**stored), found, self.top)
            return {
                "length": length,
                "tokens": len(result.kl),
                "kl": float(result.kl.sum()),
                "agree": float(result.agree.sum()),
                "rest": float(result.rest.sum()),
                "nll": float(-found.own_logprob.astype(np.float64).sum()),
            }

        return self._outcome(bench.map(measure, contexts), left_out)

    def _outcome(self, measured: list[dict[str, Any]], left_out: list[int]) -> Outcome:
        whole = _summary(measured)
        lengths = sorted({one["length"] for one in measured})
        per_length = {n: _summary([one for one in measured if one["length"] == n]) for n in lengths}
        row = {**whole, "kl_contexts": len(measured), "kl_by_length": per_length}
        per_context = [
            {"length": one["length"], "tokens": one["tokens"], "kl": one["kl"] / one["tokens"]} for one in measured
        ]
        details = {"per_context": per_context, "rest_mass": row.pop("rest_mass")}
        warnings = [f"no contexts of {length} tokens: longer than the server takes" for length in left_out]
        return Outcome(whole["kl"], whole["kl_se"], len(measured), row, details, warnings)

    def _check_chunk(self, client: Client) -> None:
        facts = client.facts
        if facts.kv_quant and (facts.chunk is None or facts.chunk > self.largest_chunk):
            raise KVQuantError(
                f"the server computes prompts in chunks of {facts.chunk or 'any size'}, whose own tokens attend to "
                f"each other unquantized: start it with --chunked-prefill-size 128 (at most {self.largest_chunk}) to "
                "measure its cache."
            )
        window = (facts.kv_quant or {}).get("prefill_window", 0)
        if window:
            raise KVQuantError(
                f"the server's prompts read up to {window} tokens before the recent ones in BF16: start it with "
                "--kv-quant-prefill-window 0 to measure its cache."
            )


def _summary(measured: list[dict[str, Any]]) -> dict[str, float | None]:
    """Computes means over tokens with standard errors between contexts; perplexity's error by the delta method."""
    counts = [one["tokens"] for one in measured]

    def of(name: str) -> tuple[float, float | None]:
        return clustered([one[name] for one in measured], counts)

    (kl, kl_se), (agree, agree_se), (nll, nll_se) = of("kl"), of("agree"), of("nll")
    perplexity = math.exp(nll)
    return {
        "kl": kl,
        "kl_se": kl_se,
        "top1_agreement": agree,
        "top1_agreement_se": agree_se,
        "perplexity": perplexity,
        "perplexity_se": None if nll_se is None else perplexity * nll_se,
        "rest_mass": of("rest")[0],
    }
