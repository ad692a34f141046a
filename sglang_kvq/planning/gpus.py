"""GPUs that ``kvq plan`` knows: their memory and bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvq.errors import KVQuantError, unknown

GIB = 1 << 30
#: Bytes of GPU memory that the driver and a CUDA context take before a server loads anything.
CONTEXT_BYTES = int(1.4 * GIB)
#: Memory in MiB as ``nvidia-smi`` shows it, and memory bandwidth in TB/s from the data sheet.
KNOWN = {
    "a100": (81_920, 2.039),
    "a100-40gb": (40_960, 1.555),
    "b200": (183_359, 8.0),
    "h100": (81_559, 3.35),
    "h20": (97_871, 4.0),
    "h200": (143_771, 4.8),
    "l40s": (46_068, 0.864),
}


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        memory: bytes that are free before a server loads anything.
        bandwidth: bytes per second of its memory.
    """

    name: str
    memory: int
    bandwidth: float

    @property
    def total(self) -> float:
        """Its whole memory in MiB, as ``nvidia-smi`` shows it."""
        return (self.memory + CONTEXT_BYTES) / (1 << 20)


def find_gpu(name: str) -> Gpu:
    """Returns the known GPU with this name, or one described as ``GIB:TB/S``.

    Raises:
        KVQuantError: ``name`` is neither; the message lists the known names.
    """
    if name.lower() in KNOWN:
        mib, bandwidth = KNOWN[name.lower()]
        return Gpu(name.lower(), (mib << 20) - CONTEXT_BYTES, bandwidth * 1e12)
    memory, colon, speed = name.partition(":")
    if not colon:
        raise unknown("--gpu", name, [*KNOWN, "GIB:TB/S, such as 80:3.35"])
    try:
        gpu = Gpu(name, int(float(memory) * GIB) - CONTEXT_BYTES, float(speed) * 1e12)
    except (ValueError, OverflowError):
        gpu = None
    if gpu is None or not (0 < gpu.memory < 1 << 50 and 0 < gpu.bandwidth < 1e15):
        raise KVQuantError(
            f"--gpu {name}: must be its GiB and its TB/s, such as 80:3.35, or one of {', '.join(KNOWN)}."
        )
    return gpu
