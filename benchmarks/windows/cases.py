"""A method with a window, its rotations, and its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kvq.cache.layout import CONTEXTS, KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.evaluation.tasks.base import short
from sglang_kvq.methods import RotationKind, get_method
from sglang_kvq.rotations import load_rotations
from sglang_kvq.rotations.identity import geometry_of, layer_numbers
from sglang_kvq.rotations.inspection.candidates import Candidate, candidate_of, takes
from sglang_kvq.rotations.resolve import resolve_rotations

SINKS, RECENTS = (0, 64, 128), (64, 256, 512, 1024, 2048)
METHODS = ("oscar", "transform:2.5")
#: Name of the unquantized model's row, which only has copies.
BF16 = "bf16"
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A method with a window."""

    method: str
    sink: int
    recent: int

    @property
    def name(self) -> str:
        return f"{self.method}, {self.sink} + {self.recent}"

    @property
    def spec(self) -> str:
        """The method as ``kvq eval`` names it."""
        return f"{self.method} --kv-quant-sink {self.sink} --kv-quant-recent {self.recent}"


def cases_of(methods: Iterable[str], sinks: Sequence[int], recents: Sequence[int]) -> list[Case]:
    return [Case(method, sink, recent) for method in methods for sink in sinks for recent in recents]


def bytes_of(case: Case, geometry: KVGeometry) -> Row:
    """Returns the bytes of one request at each of ``CONTEXTS``: its pages, and the most BF16 pages that it holds."""
    name, _, bits = case.method.partition(":")
    config = KVQuantConfig(name, bits=bits or None, sink_tokens=case.sink, recent_tokens=case.recent)
    row: Row = {"bits": round(geometry.record_bits_per_element, 3)}
    for context in CONTEXTS:
        pages = -(-context // PAGE_SIZE)
        size = pages * geometry.page_bytes + min(pages, config.slots_per_request) * geometry.slot_bytes
        row[f"bytes_{short(context)}"] = size
        row[f"bytes_{short(context)}_share"] = round(size / (pages * geometry.slot_bytes), 4)
    return row


def candidates(methods: Iterable[str], model: Any, path: str, folders: Sequence[Path]) -> dict[str, Candidate]:
    """Returns methods with rotations from a folder that suits them, else the model's own from the RotationZoo.

    Raises:
        KVQuantError: there are no such rotations.
    """
    geometry, numbers = geometry_of(model.config)._asdict(), layer_numbers(model.config)
    loaded = [load_rotations(folder, **geometry, numbers=numbers) for folder in folders]
    found = {}
    for method in methods:
        learned = None
        if get_method(method.partition(":")[0]).rotation is RotationKind.LEARNED:
            learned = next((rotations for rotations in loaded if takes(method, rotations)), None)
            if learned is None:
                name, _, bits = method.partition(":")
                learned = resolve_rotations(KVQuantConfig(name, bits=bits or None), path, model.config)
        found[method] = candidate_of(method, learned, model.config)
    return found
