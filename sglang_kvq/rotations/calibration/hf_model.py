"""A transformers model, its config and its tokenizer, or an error that says what to do.

Whatever runs a model with transformers loads it with ``load_model``, which sees that every weight was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.eligible import auto_class, needs_code
from sglang_kvq.rotations.calibration.loaded_weights import check_loaded
from sglang_kvq.rotations.calibration.model_files import check_codes, check_files
from sglang_kvq.rotations.calibration.model_source import cached_folder, find_model
from sglang_kvq.rotations.calibration.threads import limit_threads
from sglang_kvq.rotations.messages import first_line


def load_model(
    path: str, *, revision: str | None = None, device: str = "", dtype: str = "", trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        path: hub id or folder. A vision-language model is loaded whole.
        device: "cuda", "cpu", "auto" (spread over all GPUs) or "" for a GPU if there is one.
        dtype: "auto", "bfloat16", "float32", or "" for the model's own on a GPU and float32 on a CPU.
        trust_remote_code: run the code that comes with the model.

    Raises:
        KVQuantError: transformers is missing; the model is not found, is damaged, or is of a kind that transformers
            does not know; the weights are not those that the model needs; there is not the memory for it.
    """
    limit_threads()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = _source(path, revision, trust_remote_code)
    config, tokenizer = _config(path, source)
    import transformers

    loader = getattr(transformers, auto_class(path, config, trust_remote_code))
    given = {
        "dtype": dtype or ("float32" if device == "cpu" else "auto"),
        "device_map": "auto" if device == "auto" else None,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # check_loaded names them
    }
    with _explained(path, source, "model"):
        model, info = loader.from_pretrained(path, **source, **given)
        check_loaded(path, info)
        if getattr(config, "quantization_config", None) is None and (folder := cached_folder(path, revision)):
            check_codes(path, folder)
        return (model if device == "auto" else model.to(device)).eval(), tokenizer


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """A model's config and tokenizer, without its weights.

    Raises:
        KVQuantError: as ``load_model``.
    """
    return _config(path, _source(path, revision, trust_remote_code))


def tokenize(tokenizer: Any, text: str, rows: int) -> torch.Tensor:
    """Token ids int64 ``[n]``, without the warning about the model's length: contexts are cut later.

    Args:
        rows: of the model's embedding, from ``embedding_rows``.

    Raises:
        KVQuantError: an id that has no row.
    """
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    if len(ids) and int(ids.max()) >= rows:
        worst = int(ids.max())
        raise KVQuantError(
            f"{tokenizer.name_or_path}: its tokenizer gives the text token id {worst} "
            f"({tokenizer.convert_ids_to_tokens(worst)!r}), and the model's embedding has {rows} rows; the tokenizer "
            "is another model's, or was extended: give the folder with the tokenizer that belongs to these weights."
        )
    return ids


def embedding_rows(model: Any) -> int:
    """The number of token ids that a model knows, or that its config says."""
    if hasattr(model, "get_input_embeddings"):
        return int(model.get_input_embeddings().weight.shape[0])
    return int(model.get_text_config().vocab_size)


def _source(path: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Keywords of every ``from_pretrained``, of a model that is there and not damaged as far as its files tell."""
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
    """Turns whatever transformers raises into one line, and keeps its warnings and bars to itself."""
    import transformers

    logging: Any = transformers.utils.logging
    before = logging.get_verbosity()
    folder = cached_folder(path, source["revision"])
    logging.set_verbosity_error()
    if folder is not None:
        logging.disable_progress_bar()  # of what is downloaded they are of use
    try:
        yield
    except KVQuantError:
        raise
    except torch.OutOfMemoryError as error:
        raise KVQuantError(
            f"{path}: not enough GPU memory for this model ({first_line(error)}); pass --device auto to spread it over "
            "all GPUs, or --device cpu."
        ) from error
    except Exception as error:  # whatever transformers, tokenizers, safetensors and a model's own code raise
        if "trust_remote_code" in str(error):
            raise needs_code(path) from error
        if folder := cached_folder(path, source["revision"]):
            check_files(folder)
        raise KVQuantError(_cannot(path, what, error)) from error
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


def _cannot(path: str, what: str, error: Exception) -> str:
    reason = first_line(error).rstrip(".")
    if what == "tokenizer":
        return (
            f"{path}: transformers cannot load its tokenizer ({reason}); give a folder that has the model's "
            "tokenizer files (tokenizer.json, tokenizer_config.json)."
        )
    return (
        f"{path}: transformers cannot load its {what} ({reason}); fetch the whole model again, or use a version of "
        "transformers that knows it."
    )
