"""Loads a transformers model with all of its weights, its config and its tokenizer; errors say what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sglang_kvq.arguments import cached_folder, find_model
from sglang_kvq.cpus import CGROUPS, usable_cpus
from sglang_kvq.errors import KVQuantError, first_line
from sglang_kvq.rotations.calibration.eligible import auto_class, check_windows, needs_code
from sglang_kvq.rotations.calibration.model_files import check_codes, check_files

#: Maximum number of weights that a message names.
_NAMED = 3


def load_model(
    path: str, *, revision: str | None = None, device: str = "", dtype: str = "", trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Returns a causal language model in evaluation mode, and its tokenizer; loads a vision-language model whole.

    Args:
        device: "cuda", "cpu", "auto" (spread over all GPUs) or "" for a GPU if there is one.
        dtype: "auto", "bfloat16", "float32", or "" for the model's own on a GPU and float32 on a CPU.

    Raises:
        KVQuantError: transformers is missing; the model is not found, is damaged, has sliding windows in some layers,
            or is of a kind that transformers does not know; the weights are not those that the model needs; there is
            not enough memory.
    """
    limit_threads()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = _source(path, revision, trust_remote_code)
    config, tokenizer = _config(path, source)
    check_windows(path, config)
    import transformers

    loader = getattr(transformers, auto_class(path, config, trust_remote_code))
    given = {
        "dtype": dtype or ("float32" if device == "cpu" else "auto"),
        "device_map": "auto" if device == "auto" else None,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # check_loaded reports them
    }
    with _explained(path, source, "model"):
        model, info = loader.from_pretrained(path, **source, **given)
        check_loaded(path, info)
        if getattr(config, "quantization_config", None) is None and (folder := cached_folder(path, revision)):
            check_codes(path, folder)
        return (model if device == "auto" else model.to(device)).eval(), tokenizer


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Returns a model's config and tokenizer, without loading its weights."""
    return _config(path, _source(path, revision, trust_remote_code))


def tokenize(tokenizer: Any, text: str, rows: int) -> torch.Tensor:
    """Returns token ids int64 ``[n]``; refuses an id that is not among the embedding's ``rows``."""
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    if len(ids) and int(ids.max()) >= rows:
        worst = int(ids.max())
        raise KVQuantError(
            f"{tokenizer.name_or_path}: its tokenizer produces token id {worst} "
            f"({tokenizer.convert_ids_to_tokens(worst)!r}), and the model's embedding has {rows} rows; the tokenizer "
            "is another model's, or was extended. Give the folder with the tokenizer that belongs to these weights."
        )
    return ids


def embedding_rows(model: Any) -> int:
    """Returns the number of token ids that a model has embeddings for; ``model`` may be its config."""
    if hasattr(model, "get_input_embeddings"):
        return int(model.get_input_embeddings().weight.shape[0])
    return int(model.get_text_config().vocab_size)


def _source(path: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Returns keywords for every ``from_pretrained``; refuses a missing model and a local folder's damaged files."""
    found = find_model(path, revision)
    if (folder := cached_folder(path, revision)) is not None and str(folder) == path:
        check_files(folder)
    return {**found, "trust_remote_code": trust_remote_code}


def _config(path: str, source: dict[str, Any]) -> tuple[Any, Any]:
    try:
        from transformers import AutoConfig, AutoTokenizer
    except ImportError as error:
        raise KVQuantError("calibration needs transformers: pip install 'sglang-kvq[calibrate]'.") from error
    with _explained(path, source, "config"):
        config = AutoConfig.from_pretrained(path, **source)
    with _explained(path, source, "tokenizer"):
        return config, AutoTokenizer.from_pretrained(path, **source)


@contextmanager
def _explained(path: str, source: dict[str, Any], what: str) -> Iterator[None]:
    """Turns any error of transformers into one line, and hides its warnings and progress bars."""
    import transformers

    logging: Any = transformers.utils.logging
    before = logging.get_verbosity()
    folder = cached_folder(path, source["revision"])
    logging.set_verbosity_error()
    if folder is not None:
        logging.disable_progress_bar()  # they are useful only during a download
    try:
        yield
    except KVQuantError:
        raise
    except torch.OutOfMemoryError as error:
        raise KVQuantError(
            f"{path}: not enough GPU memory for this model ({first_line(error)}). Pass --device auto to spread it over "
            "all GPUs, or --device cpu."
        ) from error
    except Exception as error:  # of transformers, tokenizers, safetensors or a model's own code
        if "trust_remote_code" in str(error):
            raise needs_code(path) from error
        if folder := cached_folder(path, source["revision"]):
            check_files(folder)
        fix = "Fetch the whole model again, or use a version of transformers that knows it"
        if what == "tokenizer":
            fix = "Give a folder that has the model's tokenizer files (tokenizer.json, tokenizer_config.json)"
        reason = first_line(error).rstrip(".")
        raise KVQuantError(f"{path}: transformers cannot load its {what} ({reason}). {fix}.") from error
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


def check_loaded(path: str, info: dict[str, Any]) -> None:
    """Refuses a model whose weights are not those of its checkpoint.

    ``info`` is the loading info of ``from_pretrained``. transformers does not report harmless differences there: tied
    weights, RoPE's buffers, and weights that the model's class declares as ignored, such as MTP heads.
    """
    problems = list(_problems(info))
    if problems:
        raise KVQuantError(f"{path}: {'; '.join(problems)}. {_remedy(info)}")


def _problems(info: dict[str, Any]) -> Iterator[str]:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    other = sorted(map(_mismatch, info["mismatched_keys"]))
    for names, what in (
        (missing, "not in its files, so they would be random"),
        (unexpected, "in its files without a place in the model"),
        (other, "of another shape than config.json says"),
    ):
        if names:
            more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            yield f"{len(names)} weight{'s' * (len(names) > 1)} {what} ({', '.join(names[:_NAMED])}{more})"


def _mismatch(found: str | tuple[str, Any, Any]) -> str:
    """Formats a weight's name, with its shapes if transformers reports them, which it does since version 5."""
    if isinstance(found, str):
        return found
    name, in_file, in_model = found
    return f"{name}: {list(in_file)}, not {list(in_model)}"


def _remedy(info: dict[str, Any]) -> str:
    if any("scale" in name or "zero_point" in name for name in info["unexpected_keys"]):
        return "It is quantized in a way that transformers does not read. Calibrate the unquantized model."
    if info["mismatched_keys"]:
        return "config.json and the weights belong to different models. Fetch both again."
    return (
        "Fetch the whole model again. If these files are a part of a larger model, calibrate that one; or use a "
        "version of transformers that reads them."
    )


def limit_threads(cgroups: Path = CGROUPS) -> None:
    """Lowers PyTorch's number of threads to the CPUs that a container may use, unless ``OMP_NUM_THREADS`` is set.

    PyTorch starts a thread for each core of the host. In a small container, these threads mostly wait for each other.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cpus(cgroups))))


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits PyTorch to one thread: decompositions of 128 x 128 matrices would wait for all threads at each step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
