"""The frozen configuration, built once from the command line and sent to every process."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError

if TYPE_CHECKING:
    from sglang_kvq.methods import Width
    from sglang_kvq.sessions.config import EpisodicConfig

#: Most query heads per KV head that the kernels support.
MAX_GQA_GROUP = 16
#: Default share of BF16 pages in the KV memory, if that memory is divided once.
DEFAULT_BUDGET = 0.10


@dataclass(frozen=True)
class KVQuantConfig:
    """The values of the ``--kv-quant*`` flags, validated.

    Attributes:
        method: name in the registry of ``sglang_kvq.methods``.
        rotations: folder, ``.safetensors``/``.pt`` location or hub repo of the rotations;
            with None the method chooses (learned rotations come from the RotationZoo).
        sink_tokens: first tokens of a request kept in BF16; a multiple of ``PAGE_SIZE``.
        recent_tokens: last tokens of a request kept in BF16; a multiple of ``PAGE_SIZE``.
        recent_min: number of recent tokens that every running request keeps in BF16 when BF16 pages run short; a
            multiple of ``PAGE_SIZE``. None means all of them, so that no request starts without room for its whole
            window; in a shared memory None means 0.
        group_size: elements along head_dim (for KIVI's keys: tokens) that share one scale and offset; None means
            ``min(head_dim, 128)`` (for KIVI's keys: the page).
        clip_k, clip_v: quantile of ``|x|`` over a head's row beyond which keys/values are clipped, in (0, 1]; 1 clips
            nothing; None means the value in the rotation file, or the method's default. A given value applies to codes
            of every width, the default to INT2 codes only.
        bf16_budget: share of BF16 pages in the KV memory, in (0, 0.9). With None, BF16 pages and records share the
            memory as they need it if the server supports that (``sglang.memory.shared``); otherwise ``DEFAULT_BUDGET``.
        bits: ``--kv-quant-bits`` as given: bits per code, or ``auto:TARGET``; for ``transform``, allocated bits per
            element. None means the method's default.
        seed: seed of random rotations; None means 0.
        episodic: the values of the ``--episodic-*`` flags; None without ``--episodic-policy``.
        capture: ``FOLDER:CONTEXT:SKIP`` of ``sglang.calibration.capture_backend``; only ``kvq calibrate --engine
            sglang`` sets it.
        prefill_window: number of older tokens, before the recent ones, that a prefill may also read in BF16 while
            their BF16 copies still exist; a multiple of ``PAGE_SIZE``. With 0, prefill reads the same pages in BF16 as
            decoding.

    Raises:
        KVQuantError: a value is out of range; the message names it and the fix.
    """

    method: str
    rotations: str | None = None
    sink_tokens: int = 64
    recent_tokens: int = 256
    group_size: int | None = None
    clip_k: float | None = None
    clip_v: float | None = None
    bf16_budget: float | None = None
    bits: str | None = None
    seed: int | None = None
    episodic: EpisodicConfig | None = None
    capture: str | None = None
    prefill_window: int = 8192
    recent_min: int | None = None

    def __post_init__(self) -> None:
        from sglang_kvq.methods import RotationKind, get_method  # the registry needs this module's constants

        method = get_method(self.method)
        method.width(self.bits)
        for flag, tokens, least in (
            ("--kv-quant-sink", self.sink_tokens, 0),
            ("--kv-quant-recent", self.recent_tokens, PAGE_SIZE),
            ("--kv-quant-prefill-window", self.prefill_window, 0),
        ):
            if tokens < least or tokens % PAGE_SIZE:
                raise KVQuantError(
                    f"{flag} {tokens}: must be a multiple of the page size {PAGE_SIZE}, at least "
                    f"{least}. The nearest valid value is {max(least, round(tokens / PAGE_SIZE) * PAGE_SIZE)}."
                )
        if self.rotations is not None and not self.rotations.strip():  # as a path, it would be the working folder
            raise KVQuantError(
                f"--kv-quant-rotations {self.rotations!r}: empty. Give a folder or ORG/NAME[/FOLDER], or leave it out."
            )
        if self.recent_min is not None and not (
            0 <= self.recent_min <= self.recent_tokens and self.recent_min % PAGE_SIZE == 0
        ):
            raise KVQuantError(
                f"--kv-quant-recent-min {self.recent_min}: must be a multiple of the page size {PAGE_SIZE}, from 0 to "
                f"--kv-quant-recent {self.recent_tokens}. Leave it out to keep them all."
            )
        if self.group_size is not None and self.group_size not in (32, 64, 96, 128):
            raise KVQuantError(
                f"--kv-quant-group-size {self.group_size}: must be 32, 64, 96 or 128 and divide the "
                "model's head_dim. Leave it out for min(head_dim, 128)."
            )
        if self.group_size is not None and self.group_size not in method.group_sizes:
            sizes = " or ".join(map(str, method.group_sizes))
            raise KVQuantError(
                f"--kv-quant-group-size {self.group_size}: --kv-quant {self.method} has "
                + (f"{sizes}. Change it or leave it out." if sizes else "one scale per token row. Leave it out.")
            )
        for axis, clip, code in (("k", self.clip_k, method.k), ("v", self.clip_v, method.v)):
            if clip is not None and (method.planes or not code.clips):
                does = (
                    "already clips rows where that lowers the error" if method.planes else "does not clip these codes"
                )
                raise KVQuantError(f"--kv-quant-clip-{axis} {clip}: --kv-quant {self.method} {does}. Leave it out.")
        if self.seed is not None:
            if method.rotation is not RotationKind.RANDOM:
                raise KVQuantError(
                    f"--kv-quant-seed {self.seed}: --kv-quant {self.method} draws no random rotations. Leave it out."
                )
            if not 0 <= self.seed < 2**63:
                raise KVQuantError(f"--kv-quant-seed {self.seed}: must be at least 0 and below 2^63.")
        for flag, clip in (("--kv-quant-clip-k", self.clip_k), ("--kv-quant-clip-v", self.clip_v)):
            if clip is not None and not 0.5 <= clip <= 1.0:
                raise KVQuantError(
                    f"{flag} {clip}: must be between 0.5 and 1 (1 clips nothing). Typical values are 0.88 to 0.98."
                )
        if self.episodic is not None:
            self.episodic.check_windows(self.sink_tokens, self.recent_tokens)
        if self.bf16_budget is not None and not 0.0 < self.bf16_budget < 0.9:
            raise KVQuantError(
                f"--kv-quant-bf16-budget {self.bf16_budget}: must be above 0 and below 0.9; it is the share of the KV "
                "memory kept for BF16 pages. Leave it out, and BF16 pages take what they need."
            )

    @property
    def bf16_share(self) -> float:
        """Share of BF16 pages in a KV memory that is divided once."""
        return DEFAULT_BUDGET if self.bf16_budget is None else self.bf16_budget

    @property
    def width(self) -> Width:
        """The parsed value of ``--kv-quant-bits``."""
        from sglang_kvq.methods import get_method

        return get_method(self.method).width(self.bits)

    @property
    def sink_pages(self) -> int:
        return self.sink_tokens // PAGE_SIZE

    @property
    def recent_pages(self) -> int:
        return self.recent_tokens // PAGE_SIZE

    @property
    def prefill_pages(self) -> int:
        return self.prefill_window // PAGE_SIZE

    @property
    def kept_pages(self) -> int:
        """Number of recent pages whose BF16 copies a running request never loses."""
        return (self.recent_tokens if self.recent_min is None else self.recent_min) // PAGE_SIZE

    @property
    def slots_per_request(self) -> int:
        """Most BF16 slots that a running request holds: sinks, window, and the page being filled."""
        return self.sink_pages + self.recent_pages + 1

    def pinned_slots(self, written: int = 1) -> int:
        """Returns how many BF16 slots a running request never loses, if its steps write ``written`` tokens."""
        filled = 1 + -(-(written - 1) // PAGE_SIZE)
        return min(self.sink_pages + self.kept_pages + filled, self.slots_per_request)

    def within(self, context: int) -> KVQuantConfig:
        """Returns this configuration with sinks and a recent window that a request of ``context`` tokens can fill."""
        most = (-(-max(context, 0) // PAGE_SIZE) + 1) * PAGE_SIZE  # one page more, for drafts beyond the context
        recent_min = None if self.recent_min is None else min(self.recent_min, most)
        return replace(
            self,
            sink_tokens=min(self.sink_tokens, most),
            recent_tokens=min(self.recent_tokens, most),
            recent_min=recent_min,
        )

    def describe(self) -> str:
        """Returns one line for logs, with the method and every field that differs from its default."""
        parts = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name == "method" or getattr(self, f.name) != f.default
        ]
        return ", ".join(parts)
