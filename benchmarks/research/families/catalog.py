"""The methods that are judged at each budget, with their settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.research.families import gear, palu
from benchmarks.research.families.base import History, Method
from benchmarks.research.families.h2o import H2O
from benchmarks.research.families.kvmerger import KVMerger
from benchmarks.research.families.model import Prefilled, prefill
from benchmarks.research.families.palu import Bases
from benchmarks.research.families.served import preset, served
from benchmarks.research.families.snapkv import SnapKV
from sglang_kvq.rotations.calibration.rope import turn_of
from sglang_kvq.rotations.identity import geometry_of

BUDGETS = (2.0, 2.5, 4.0)
#: The widest setting of each served method within a budget, for heads of 64 and of 128 dims.
SERVED: dict[float, tuple[str, ...]] = {
    2.0: ("transform:2",),
    2.5: ("transform:2.5", "oscar:2", "turboquant:2", "kivi:2"),
    4.0: ("transform:4", "oscar:3.5", "turboquant:3.5", "kivi:2/32"),
}


@dataclass(frozen=True)
class Entry:
    """A method at a budget. ``choosing``: which tokens it keeps depends on the queries before it compresses."""

    budget: float
    name: str
    setting: str
    method: Method | None
    choosing: bool = False

    @property
    def key(self) -> str:
        return f"{self.budget:g}/{self.name}"


@dataclass(frozen=True)
class Calibration:
    """Data that methods may learn from, taken from text that is not judged.

    Attributes:
        read: contexts of the calibration texts.
        layers: layers on which settings are tried.
    """

    read: Sequence[Prefilled]
    layers: Sequence[int]

    @classmethod
    def of(cls, model: Any, contexts: Sequence[torch.Tensor]) -> Calibration:
        """Reads contexts of token ids int64 ``[T]``."""
        layers = geometry_of(model.config).layers
        return cls([prefill(model, ids) for ids in contexts], [layers // 4, layers // 2, layers * 3 // 4])

    def histories(self) -> list[tuple[int, History]]:
        return [(layer, self.read[-1].history(layer)) for layer in self.layers]

    def bases(self, hf_config: Any) -> Bases:
        """Returns bases from second moments of keys before RoPE and of values, of all heads together."""
        layers, heads, dim = geometry_of(hf_config)
        turn, longest = turn_of(hf_config, dim), max(one.tokens for one in self.read)
        device = self.read[0].k.device
        turns = torch.stack([turn(at) for at in range(2 * longest)]).float().to(device)
        moments = torch.zeros(2, layers, heads * dim, heads * dim, dtype=torch.float64, device=device)
        for one in self.read:
            at = torch.arange(one.tokens, device=device)
            for layer in range(layers):
                k = palu.before_rope(one.k[layer].float(), at, turns)
                for part, x in enumerate((k, one.v[layer].float())):
                    rows = x.transpose(0, 1).flatten(1).double()
                    moments[part, layer] += rows.T @ rows
        return Bases.of(*moments, turns)

    def best(self, settings: Sequence[Method]) -> Method:
        """Returns the setting with the least relative error of keys and values."""
        return min(settings, key=self._error)

    def _error(self, method: Method) -> float:
        total = 0.0
        for layer, history in self.histories():
            found = method(layer, history)
            for x, y in ((history.k, found.k), (history.v, found.v)):
                total += float((x - y).square().sum() / (x - x.mean(1, keepdim=True)).square().sum())
        return total


def catalog(
    model_path: str,
    hf_config: Any,
    calibration: Calibration,
    budgets: Sequence[float],
    rotations: dict[str, str] | None = None,
) -> Iterator[Entry]:
    """Generates all entries, BF16 first; ``rotations`` are folders for ``transform`` and ``oscar``, else the zoo's."""
    given = rotations or {}
    bases = calibration.bases(hf_config)
    sample = calibration.histories()[0][1]
    yield Entry(16.0, "none", "bf16", None)
    for budget in budgets:
        for spec in SERVED[budget]:
            name = spec.partition(":")[0]
            yield Entry(budget, name, spec, served(spec, model_path, hf_config, given.get(name)))
        chosen = calibration.best(gear.settings(budget, sample))
        yield Entry(budget, "gear", _describe(chosen, "width", "rank", "outliers", "group"), chosen)
        chosen = calibration.best(palu.settings(bases, budget))
        yield Entry(budget, "palu", _describe(chosen, "share", "width"), chosen)
        one = preset(budget, model_path, hf_config, given.get("transform"))
        widths = one.formats[0].describe() if hasattr(one.formats[0], "describe") else str(one.formats[0])
        yield Entry(budget, "palu-preset", widths, one)
        yield Entry(budget, "kvmerger", "", KVMerger(budget), choosing=True)
        yield Entry(budget, "h2o", "", H2O(budget), choosing=True)
        yield Entry(budget, "snapkv", "kernel 7", SnapKV(budget), choosing=True)


def _describe(method: Any, *names: str) -> str:
    return ", ".join(f"{name} {getattr(method, name):g}" for name in names)
