"""``kvq doctor --model``: says from a model's config whether it is served, what a token takes and how many tokens fit.

It loads no weights. It only adds up the sizes of their files, to guess how much of a GPU's memory they leave.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from sglang_kvq.arguments import TIMEOUT, find_model
from sglang_kvq.cache.layout import KVGeometry, NoRoom
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError, unknown
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.methods import METHOD_NAMES, RotationKind, get_method
from sglang_kvq.rotations.calibration.eligible import calibrate_command, needs_code, why_not
from sglang_kvq.rotations.calibration.model_files import check_config, weight_files
from sglang_kvq.rotations.identity import cached_layers, unapplied_window
from sglang_kvq.rotations.resolve import locate_rotations, resolve_formats, resolve_rotations
from sglang_kvq.rotations.storage.registry import HubLocation
from sglang_kvq.rotations.storage.zoo import is_inferred
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.architectures import Answer, Family, family_of
from sglang_kvq.sglang.doctor.capacity import capacity, default_chunk
from sglang_kvq.sglang.types import ModelConfig

#: Upper bound of ``--memory`` in GiB, more than any GPU has.
MOST_MEMORY = 1 << 20
#: Approximate share of a GPU's memory that SGLang gives to weights and KV cache; it depends on GPU and flags.
STATIC_SHARE = 0.88

UNKNOWN_CLASS = "SGLang has no class for it that this release of sglang-kvq knows"


@dataclass(frozen=True)
class Request:
    """Options of the command, named like the server's flags if such flags exist.

    Attributes:
        memory: GiB of each GPU for the KV cache; None means a guess, if there is a GPU.
        tp: number of workers that share the heads.
        flag: precedes the model in messages; empty where the model is an argument.
    """

    model: str
    config: KVQuantConfig
    memory: float | None = None
    tp: int = 1
    trust_remote_code: bool = False
    flag: str = "--model "

    def __post_init__(self) -> None:
        if self.memory is not None and not 0 < self.memory < MOST_MEMORY:
            raise KVQuantError(
                f"--memory {self.memory:g}: must be the GiB that a GPU has for the KV cache, above 0 and below "
                f"{MOST_MEMORY}."
            )
        if self.tp < 1:
            raise KVQuantError(f"--tp {self.tp}: must be the number of GPUs, at least 1.")


def config_of(method: str, bits: str | None, rotations: str | None) -> KVQuantConfig:
    """Builds the configuration that the server's flags would give.

    Raises:
        KVQuantError: the method is unknown or ``none``, or does not have these bits.
    """
    if method == "none":
        raise KVQuantError(f"--method none: plain SGLang serves it. Choose one of {', '.join(METHOD_NAMES)}.")
    if method not in METHOD_NAMES:
        raise unknown("--method", method, METHOD_NAMES)
    return KVQuantConfig(method, rotations=rotations, bits=bits)


@dataclass
class Diagnosis:
    """The diagnosis of one model. A field that does not apply or is not known is None.

    Attributes:
        answer: ``served`` or ``refused``, for this model even if its family is served in part.
        evidence: how it is known that the family is served.
        why, lift: reason of a refusal, and what would lift it.
        layers: number of all layers; ``quantized_layers`` of them have their cache in our pool.
        query_heads, kv_heads: heads on one GPU.
        rotations: where the rotations would come from; None if the method needs no files, or if none are known.
        rotations_inferred: the name of the rotations' folder on the hub is inferred, not confirmed.
        calibrate: the command that makes missing rotations.
        bytes_bf16, bytes_quantized: bytes of a token in all layers, on one GPU.
        memory: bytes on one GPU for the KV cache, sliding windows and recurrent states.
        memory_from: origin of ``memory``, in words.
        tokens_bf16, tokens, requests: tokens that fit in BF16 and quantized, and requests that can run at once.
        beside: other content of the memory: sliding windows or recurrent states.
        window: tokens of the config's ``sliding_window`` if SGLang does not apply it.
        flags: flags that a server of the model needs.
    """

    model: str
    method: str
    answer: str
    architectures: list[str] = field(default_factory=list)
    family: str | None = None
    evidence: str | None = None
    note: str | None = None
    why: str | None = None
    lift: str | None = None
    layers: int | None = None
    quantized_layers: int | None = None
    query_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    rotations: str | None = None
    rotations_inferred: bool = False
    calibrate: str | None = None
    bytes_bf16: int | None = None
    bytes_quantized: float | None = None
    memory: int | None = None
    memory_from: str | None = None
    tokens_bf16: int | None = None
    tokens: int | None = None
    requests: int | None = None
    beside: str | None = None
    window: int | None = None
    flags: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """The command that serves the model."""
        return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", self.model, *self.flags])


def report(request: Request, show: Callable[[str], None] = print, *, as_json: bool = False) -> int:
    """Shows the diagnosis, as lines or one JSON object; returns the exit status, 1 if the model is refused.

    Raises:
        KVQuantError: SGLang is not installed, the config cannot be read, or a setting is wrong.
    """
    found = diagnose(request)
    if as_json:
        show(
            json.dumps({**asdict(found), "command": found.command if found.answer == Answer.SERVED else None}, indent=1)
        )
    else:
        for line in lines(found, request):
            show(line)
    return int(found.answer != Answer.SERVED)


def diagnose(request: Request) -> Diagnosis:
    """Diagnoses one model.

    Raises:
        KVQuantError: SGLang is not installed, the config cannot be read, or a setting is wrong.
    """
    check_readable(Path(request.model))
    model, flags = read_config(request)
    names = list(model.hf_config.architectures or [])
    family = family_of(names)
    found = Diagnosis(request.model, request.config.method, Answer.SERVED.value, names)
    if family is None:
        return _refuse(found, None, UNKNOWN_CLASS)
    found.family, found.note = family.name, family.note or None
    try:
        check_served(model, request.config, request.tp)
    except KVQuantError as error:
        return _refuse(found, family, str(error))
    found.evidence = family.evidence.value if family.evidence else None
    found.layers, found.quantized_layers = model.num_attention_layers, len(cached_layers(model.hf_config))
    found.window = unapplied_window(model.hf_config)
    found.query_heads = max(1, model.num_attention_heads // request.tp)
    found.kv_heads, found.head_dim = model.get_num_kv_heads(request.tp), model.head_dim
    found.flags = [*flags, "--kv-quant", request.config.method]
    if request.tp > 1:
        found.flags += ["--tp", str(request.tp)]
    if request.config.bits is not None:
        found.flags += ["--kv-quant-bits", request.config.bits]
    formats = _formats(found, request, model)
    if formats is not None:
        _count(found, request, KVGeometry(model.get_num_kv_heads(request.tp), formats), model)
    return found


def check_served(model: ModelConfig, config: KVQuantConfig, tp: int) -> None:
    """Refuses a model if a server would refuse its config.

    Args:
        tp: number of workers that share the heads.

    Raises:
        KVQuantError: names the first reason.
    """
    from sglang_kvq.sglang import checks

    if family_of(model.hf_config.architectures or []) is None:
        raise KVQuantError(f"{model.model_path}: {UNKNOWN_CLASS}.")
    checks.check_model(model, config)
    checks.check_division(model, tp)
    checks.check_query_heads(model, tp)
    check_layers_agree(model)


def check_layers_agree(model: ModelConfig) -> None:
    """Refuses a model if SGLang and the config name different layers of full attention, as a server does.

    Raises:
        KVQuantError: names both sets of layers.
    """
    ours, full = cached_layers(model.hf_config), getattr(model, "full_attention_layer_ids", None)
    if model.is_hybrid_swa and tuple(full or ()) != ours:
        raise KVQuantError(
            f"{model.model_path}: according to SGLang, layers {full} have full attention; according to the model's "
            f"config, layers {list(ours)}. Serve it without --kv-quant."
        )


def read_config(request: Request) -> tuple[ModelConfig, list[str]]:
    """Returns SGLang's config of the model, and the flags that a server of it needs: its dtype, code of its own.

    Raises:
        KVQuantError: SGLang is not installed or cannot read the config.
    """
    from sglang_kvq.sglang.doctor.report import torch_and_gpus

    named = f"{request.flag}{request.model}"
    try:
        version = compat.sglang_version()
    except metadata.PackageNotFoundError:
        raise KVQuantError(f"{named}: only SGLang can read its config, and it is not installed here.") from None
    try:
        find_model(request.model)
        check_config(Path(request.model))
    except KVQuantError as error:
        raise KVQuantError(f"{request.flag}{error}") from None
    torch_and_gpus()  # chooses SGLang's engine
    trusted = ["--trust-remote-code"] if request.trust_remote_code else []
    import torch

    with _quietly():
        from sglang.srt.configs.model_config import ModelConfig

        def read(dtype: str) -> ModelConfig:
            return ModelConfig(request.model, trust_remote_code=request.trust_remote_code, dtype=dtype)

        try:
            model = read("auto")
            if model.dtype == torch.bfloat16:
                return model, trusted
            return read("bfloat16"), ["--dtype", "bfloat16", *trusted]
        except Exception as error:  # SGLang, transformers and the hub raise many types for a missing model
            if "trust_remote_code" in str(error):
                raise needs_code(request.model) from None
            text = str(error).strip().partition("\n")[0]
            raise KVQuantError(
                f"{named}: SGLang {version} cannot read its config: {text or type(error).__name__}"
            ) from None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silences remarks of SGLang and transformers on a config or on this machine."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _refuse(found: Diagnosis, family: Family | None, why: str) -> Diagnosis:
    found.answer, found.why = Answer.REFUSED.value, why
    if family is not None and family.reason is not None and family.reason.what.split(" (")[0] in why:
        found.lift = family.reason.lift
    return found


def _formats(found: Diagnosis, request: Request, model: ModelConfig) -> tuple[RecordFormat, ...] | None:
    """Returns the formats of all layers; None while the rotations that decide them are missing.

    Notes the rotations' origin in ``found``.

    Raises:
        KVQuantError: the given rotations do not fit the model or the method.
    """
    config, rotations = request.config, None
    method = get_method(config.method)
    if method.rotation is RotationKind.LEARNED:
        try:
            found.rotations = locate_rotations(config, request.model, model.hf_config)
            found.rotations_inferred = is_inferred(found.rotations)
        except KVQuantError:
            why = why_not(request.model, model.hf_config, request.trust_remote_code, transform=method.planes)
            if why is not None and config.rotations is None:
                _refuse(found, None, f"--kv-quant {config.method} needs rotations, and there are none: {why}")
                found.lift = "--method int4, which needs none"
                return None
            found.calibrate = calibrate_command(
                request.model, model.hf_config, request.trust_remote_code, transform=method.planes
            )
            found.flags += ["--kv-quant-rotations", "rotations"]
        if config.rotations is not None:
            _check_place(config.rotations)
            found.flags += ["--kv-quant-rotations", config.rotations]
        if found.rotations is not None and (os.path.exists(found.rotations) or not HubLocation.parse(found.rotations)):
            rotations = resolve_rotations(config, request.model, model.hf_config)
    else:
        resolve_rotations(config, request.model, model.hf_config)  # refuses files that mean nothing to the method
    if rotations is None and (method.planes or config.width.target is not None):
        return None
    return resolve_formats(config, rotations, model.hf_config)


def _check_place(rotations: str) -> None:
    """Refuses rotations that are no existing folder and whose name cannot be on the hub."""
    if not Path(rotations).exists() and not HubLocation.parse(rotations):
        raise KVQuantError(f"--rotations {rotations}: no such folder. Give one, or org/name/folder on the hub.")


def _count(found: Diagnosis, request: Request, geometry: KVGeometry, model: ModelConfig) -> None:
    """Fills in the bytes per token, and the tokens and requests that fit in memory."""
    found.bytes_bf16 = geometry.slot_bytes // PAGE_SIZE
    found.bytes_quantized = geometry.page_bytes / PAGE_SIZE
    if request.memory is not None:
        found.memory, found.memory_from = int(request.memory * 2**30), "--memory"
    else:
        _guess_memory(found, request, model)
    if found.memory is not None:
        chunk = default_chunk(compat.gpu_memory())
        try:
            held = capacity(request.config, geometry, model, request.tp, found.memory, chunk)
        except NoRoom as error:
            if request.memory is None:
                raise
            raise KVQuantError(f"--memory {request.memory:g}: {error.problem} Raise --memory.") from None
        found.tokens_bf16, found.tokens, found.requests = held.tokens_bf16, held.tokens, held.requests
        found.beside = held.beside


def _guess_memory(found: Diagnosis, request: Request, model: ModelConfig) -> None:
    import torch

    weights = weight_bytes(model)
    if not torch.cuda.is_available() or weights is None:
        return
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    left = int(gpu.total_memory * STATIC_SHARE) - weights // request.tp
    found.memory_from = (
        f"{gpu.name}, about: {STATIC_SHARE:.0%} of it less {weights / request.tp / 2**30:.1f} GiB of weights"
    )
    if left > 0:
        found.memory = left


def check_readable(folder: Path) -> None:
    """Refuses a local model with a file that this user may not read; loaders of weights would report it as missing.

    Raises:
        KVQuantError: names the file, its owner and the fix.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file() and not os.access(path, os.R_OK):
            found = path.stat()
            raise KVQuantError(
                f"--model {folder}: {path.name} cannot be read: it belongs to user {found.st_uid} and has mode "
                f"{found.st_mode & 0o777:04o}, this process runs as user {os.geteuid()}. Run chmod a+r on it."
            )


def weight_bytes(model: ModelConfig) -> int | None:
    """Returns the bytes of a model's safetensors: a folder's files, or on the hub its index or only file.

    None if they are not known.
    """
    folder = Path(model.model_path)
    if folder.is_dir():
        return sum(path.stat().st_size for path in weight_files(folder)) or None
    from transformers.utils.hub import cached_file

    index = cached_file(
        model.model_path,
        "model.safetensors.index.json",
        revision=model.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if index is None:
        return _only_file_bytes(model)
    size: int = json.loads(Path(index).read_text()).get("metadata", {}).get("total_size", 0)
    return size or None


def _only_file_bytes(model: ModelConfig) -> int | None:
    """Returns the bytes of the one file that a small model on the hub has; None if it has none, or no hub answers."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    place = model.model_path, "model.safetensors"
    cached = try_to_load_from_cache(*place, revision=model.revision)
    if isinstance(cached, str):
        return Path(cached).stat().st_size
    try:
        size: int | None = get_hf_file_metadata(hf_hub_url(*place, revision=model.revision), timeout=TIMEOUT).size
    except Exception:  # the type for a hub that does not answer depends on the HTTP library
        return None
    return size


def lines(found: Diagnosis, request: Request) -> Iterator[str]:
    """Yields the diagnosis in words, line by line."""
    names = ", ".join(found.architectures) or "no architecture in its config"
    if found.answer != Answer.SERVED:
        yield f"refused: {found.why}"
        if found.lift:
            yield f"  would be lifted by: {found.lift}"
        return
    yield f"served: {found.model}"
    yield f"  family         {found.family} ({names}): {found.evidence}{f'; {found.note}' if found.note else ''}"
    heads = f"{found.query_heads} query heads over {found.kv_heads} KV heads of {found.head_dim} elements"
    yield f"  attention      {heads}{f' on each of {request.tp} GPUs' if request.tp > 1 else ''}"
    yield f"  layers         {found.quantized_layers} of {found.layers} are quantized"
    if found.window is not None:
        yield (
            f"  window         SGLang does not apply the config's sliding_window of {found.window:,} tokens: all "
            "layers see all tokens, here and in `kvq calibrate`"
        )
    if get_method(found.method).rotation is RotationKind.LEARNED:
        inferred = " (the folder's name is inferred)" if found.rotations_inferred else ""
        yield f"  rotations      {found.rotations or f'none known; first: {found.calibrate}'}{inferred}"
    if found.bytes_bf16 and found.bytes_quantized:
        ratio = found.bytes_bf16 / found.bytes_quantized
        firsts = "first tokens in BF16 counted, " if get_method(found.method).planes else ""
        yield (
            f"  KV of a token  {found.bytes_bf16:,} bytes in BF16, {found.bytes_quantized:,.0f} with --kv-quant "
            f"{found.method} ({ratio:.2f}x less), {firsts}windows not counted"
        )
    if found.tokens is not None and found.memory is not None:
        yield (
            f"  tokens         {found.tokens_bf16:,} in BF16, {found.tokens:,} with --kv-quant {found.method}, windows "
            f"counted; {found.requests:,} requests at once; in {found.memory / 2**30:.1f} GiB ({found.memory_from})"
        )
        if found.beside:
            yield f"  beside them    {found.beside}, in the same memory"
    elif found.bytes_bf16:
        gone = (
            f"the weights leave no memory ({found.memory_from}); try --tp" if found.memory_from else "give --memory GiB"
        )
        yield f"  tokens         {gone}"
    yield f"  serve with     {found.command}"
