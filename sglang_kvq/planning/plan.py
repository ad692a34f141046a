"""Computes what fits on given GPUs for each way to store the cache, and finds a way that serves the user's wish.

The memory is divided by the code that a server uses: ``cache.layout`` and ``sglang.doctor.capacity``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from sglang_kvq.cache.layout import KVGeometry, contexts_within
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.methods import METHOD_NAMES, RotationKind, get_method
from sglang_kvq.planning.gpus import GIB, Gpu
from sglang_kvq.planning.weights import Weights
from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.calibration.eligible import calibrate_command, why_not
from sglang_kvq.rotations.identity import geometry_of
from sglang_kvq.rotations.resolve import locate_rotations, plane_formats, resolve_formats
from sglang_kvq.sglang.doctor.capacity import capacity, default_chunk, plain_capacity, state_bytes, window_bytes
from sglang_kvq.sglang.types import ModelConfig

#: Widths of transform coding that are tried to serve a wish, in bits per element.
PLANE_WIDTHS = tuple(4 - 0.25 * i for i in range(12))
#: Shares of the KV memory for BF16 pages that are tried to serve a wish, in percent.
BUDGETS = range(2, 90)
#: Methods that ``best`` may advise, the best one first. Without rotations of the model, keys at few bits lose far more
#: than with them (docs/methods.md).
ADVISED = ("int4", "transform", "oscar", "turboquant", "hadamard")


@dataclass(frozen=True)
class Place:
    """The GPUs on which the model is to run.

    Attributes:
        count: GPUs in all; each ``tp`` of them hold one copy of the model.
        fraction: ``--mem-fraction-static``.
    """

    gpu: Gpu
    count: int = 1
    tp: int = 1
    fraction: float = 0.85

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise KVQuantError(f"--tp {self.tp}: must be the GPUs that hold one copy of the model, at least 1.")
        if self.count < 1 or self.count % self.tp:
            raise KVQuantError(f"--count {self.count}: must be a multiple of --tp {self.tp}, and at least {self.tp}.")
        if not 0 < self.fraction < 1:
            raise KVQuantError(f"--mem-fraction-static {self.fraction:g}: must be above 0 and below 1.")

    @property
    def copies(self) -> int:
        """Number of copies of the model, each with its own cache."""
        return self.count // self.tp

    def of_a_copy(self, requests: int) -> int:
        """Returns how many of all requests one copy serves."""
        return -(-requests // self.copies)

    def cache_memory(self, weights: Weights) -> int:
        """Returns the bytes of each GPU that are left for the cache: the server's fraction minus the weights.

        Raises:
            KVQuantError: no memory is left.
        """
        mine = weights.total // self.tp
        left = int(self.gpu.memory * self.fraction) - mine
        if left <= 0:
            raise KVQuantError(
                f"--gpu {self.gpu.name}: {self.fraction:g} of its {self.gpu.memory / GIB:.1f} GiB leave no "
                f"memory for the cache after {mine / GIB:.1f} GiB of weights per GPU. Raise --tp, or choose a larger "
                "GPU."
            )
        return left


@dataclass(frozen=True)
class Wish:
    """The load that the user wants to serve: ``concurrency`` requests at once, each of ``context`` tokens.

    The tokens of a request are its prompt and answer.
    """

    context: int
    concurrency: int


@dataclass(frozen=True)
class Row:
    """One way to store the cache on these GPUs.

    Attributes:
        name: ``BF16``, ``FP8`` or a method.
        bits: allocated bits per element of the history, without BF16 pages, but with first tokens that are kept.
        setting: ``--kv-quant-bits``; None for the method's default, or without a method.
        budget: ``--kv-quant-bf16-budget``; None without a method, and if records and BF16 pages share the memory.
        tokens, requests: limits of all copies together without ``--max-running-requests``; ``requests`` None means no
            limit.
        at: number of requests that fit, by context.
        rotations: location of the method's rotations; "" if none are known; None if the method needs no rotation file.
        error: why not a single request fits; None if one does.
        serves: whether it serves the wish.
        step_ms: lower bound on the time of a decode step that serves the wish, from memory bandwidth alone.
    """

    name: str
    bits: float
    setting: str | None
    budget: float | None
    tokens: int
    requests: int | None
    at: dict[int, int]
    rotations: str | None = None
    error: str | None = None
    serves: bool = False
    step_ms: float | None = None


class Planner:
    """Computes the rows for one model on given GPUs.

    Args:
        path: hub id or folder, as the user gave it.
        wish: the load to serve; None if the user named none.
        trust_remote_code: whether commands run the code that comes with the model.
    """

    def __init__(
        self,
        path: str,
        model: ModelConfig,
        weights: Weights,
        place: Place,
        wish: Wish | None,
        trust_remote_code: bool = False,
    ) -> None:
        self.path, self.model, self.weights, self.place, self.wish = path, model, weights, place, wish
        self._calibrated = path, model.hf_config, trust_remote_code
        self.memory = place.cache_memory(weights)
        self.contexts = contexts_within(model.context_len)
        geometry = self._geometry(KVQuantConfig("hadamard"))  # any method will do: BF16 sizes do not depend on it
        self.token_bytes = geometry.slot_bytes / PAGE_SIZE
        self.other_bytes = 2 * state_bytes(model, place.tp)  # per request and step: its state is read and written
        if wish is not None and model.is_hybrid_swa:
            self.other_bytes += min(int(model.sliding_window_size), wish.context) * window_bytes(model, place.tp)
        self._rotations: dict[bool, str | None] = {}

    def plain_rows(self) -> Iterator[Row]:
        """Yields the rows of SGLang without the plugin: with a BF16 cache, and with an FP8 cache."""
        geometry = self._geometry(KVQuantConfig("hadamard"))
        in_bf16, requests = plain_capacity(geometry, self.model, self.place.tp, self.memory)
        for name, bits in (("BF16", 16), ("FP8", 8)):
            tokens = in_bf16 * 16 // bits
            yield self._row(name, bits, None, None, tokens, requests, bits / 16, _fitting(tokens, requests))

    def method_rows(self) -> Iterator[Row]:
        """Yields each method's row at its default width and budget, or at the nearest budget that serves the wish."""
        for name in METHOD_NAMES:
            yield self.row_of(name, None)

    def row_of(self, name: str, setting: str | None) -> Row:
        """Returns a method's row at a width; the budget is chosen as in ``method_rows``."""
        config = KVQuantConfig(name, bits=setting)
        geometry = self._geometry(config)
        try:
            row = self._method_row(config, geometry)
            chosen = row.serves or row.budget is None
        except KVQuantError as error:
            bits = 16 * geometry.page_bytes / geometry.slot_bytes
            row = Row(name, bits, setting, None, 0, 0, dict.fromkeys(self.contexts, 0), error=str(error))
            chosen = False
        if chosen or self.wish is None or self._is_hopeless(self.wish, geometry):
            return row
        for percent in sorted(BUDGETS, key=lambda percent: abs(percent / 100 - config.bf16_share)):
            try:
                other = self._method_row(replace(config, bf16_budget=percent / 100), geometry)
            except KVQuantError:  # too small for one request's window
                continue
            if other.serves:
                return other
        return row

    def best(self) -> Row | None:
        """Returns the row of the best method that serves the wish, with its most bits that do; None if none does."""
        for name in ADVISED:
            method = get_method(name)
            if self._known_rotations(KVQuantConfig(name)) == "" and why_not(*self._calibrated, transform=method.planes):
                continue
            for bits in sorted(PLANE_WIDTHS if method.planes else method.widths, reverse=True):
                row = self.row_of(name, None if bits == method.widths[0] else f"{bits:g}")
                if row.serves:
                    return row
        return None

    def calibrate_command(self, name: str) -> str:
        """Returns the command that makes rotations of the model for the method ``name``."""
        return calibrate_command(*self._calibrated, transform=get_method(name).planes)

    def _is_hopeless(self, wish: Wish, geometry: KVGeometry) -> bool:
        """Returns True if the memory holds too few tokens for the wish, even without any BF16 pages."""
        tokens = self.memory // geometry.page_bytes * PAGE_SIZE
        return self.place.copies * (tokens // wish.context) < wish.concurrency

    def _geometry(self, config: KVQuantConfig) -> KVGeometry:
        return KVGeometry(self.model.get_num_kv_heads(self.place.tp), self._formats(config))

    def _formats(self, config: KVQuantConfig) -> tuple[RecordFormat, ...]:
        """Returns the page formats of all layers.

        For transform coding, the widths of planes depend on the rotations, but their sum depends little. So this uses
        made-up rotations, whose channel energies fall like measured ones.
        """
        if not get_method(config.method).planes:
            return resolve_formats(config, None, self.model.hf_config)
        layers, heads, head_dim = geometry_of(self.model.hf_config)
        energies = torch.logspace(0, -4, head_dim).expand(layers, heads, head_dim)
        matrix = torch.eye(head_dim).expand(layers, 1, head_dim, head_dim)
        importance = torch.logspace(0, -1, 2 * layers).tolist()  # layers differ, so that all of a budget can be spent
        meta = RotationMeta("transform", importance={"k": importance[::2], "v": importance[1::2]})
        rotations = Rotations(matrix, matrix, meta, k_energies=energies, v_energies=energies)
        return plane_formats(rotations, config.width.bits)

    def _method_row(self, config: KVQuantConfig, geometry: KVGeometry) -> Row:
        chunk = default_chunk(self.place.gpu.total)
        held = capacity(config, geometry, self.model, self.place.tp, self.memory, chunk)
        row = self._row(
            config.method,
            16 * geometry.page_bytes / geometry.slot_bytes,
            config.bits,
            config.bf16_share if held.shared is None else None,
            held.tokens,
            held.requests,
            geometry.page_bytes / geometry.slot_bytes,
            held.requests_at,
            bf16_tokens=config.slots_per_request * PAGE_SIZE,
        )
        return replace(row, rotations=self._known_rotations(config))

    def _row(
        self,
        name: str,
        bits: float,
        setting: str | None,
        budget: float | None,
        tokens: int,
        requests: int | None,
        share: float,
        fitting: Callable[[int], int],
        bf16_tokens: int = 0,
    ) -> Row:
        """Returns a row for all copies; ``tokens``, ``requests`` and ``fitting`` are those of one copy.

        share: bytes of a token in the history, divided by its bytes in BF16. fitting: returns how many requests of
        some tokens fit. bf16_tokens: tokens of a request that are in BF16 pages.
        """
        copies, wish = self.place.copies, self.wish
        serves = wish is not None and copies * fitting(wish.context) >= wish.concurrency
        return Row(
            name,
            bits,
            setting,
            budget,
            copies * tokens,
            None if requests is None else copies * requests,
            {context: copies * fitting(context) for context in self.contexts},
            serves=serves,
            step_ms=self._step_ms(wish, share, bf16_tokens) if wish is not None and serves else None,
        )

    def _step_ms(self, wish: Wish, share: float, bf16_tokens: int) -> float:
        """Returns the bytes that a GPU reads in a step divided by its bandwidth; copies share the requests equally."""
        window = min(bf16_tokens, wish.context)
        history = (wish.context - window) * share + window
        requests = self.place.of_a_copy(wish.concurrency)
        weights = self.weights.read_by(requests, self.model.hf_text_config) / self.place.tp
        return 1e3 * (weights + requests * (history * self.token_bytes + self.other_bytes)) / self.place.gpu.bandwidth

    def _known_rotations(self, config: KVQuantConfig) -> str | None:
        method = get_method(config.method)
        if method.rotation is not RotationKind.LEARNED:
            return None
        if method.planes not in self._rotations:
            try:
                self._rotations[method.planes] = locate_rotations(config, self.path, self.model.hf_config)
            except KVQuantError:  # none are known: `kvq calibrate` makes them
                self._rotations[method.planes] = ""
        return self._rotations[method.planes]


def _fitting(tokens: int, requests: int | None) -> Callable[[int], int]:
    """Returns a function from the tokens of a request to the number of requests that fit in ``tokens``.

    requests: the most requests; None for no limit.
    """
    return lambda context: tokens // context if requests is None else min(tokens // context, requests)
