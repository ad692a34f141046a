"""Data that all methods of an output folder share: tokenized text and the reference's distributions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.client import Client, RequestRefused
from sglang_kvq.evaluation.files import digest, write_whole

#: Not NumPy's own format: its headers are parsed as Python, and CPython 3.11 cannot do that in many threads at once
#: ("AST constructor recursion depth mismatch").
SUFFIX = ".safetensors"


class Material:
    """Stores arrays in a folder by the hash of their origin; safe to use from many threads.

    Args:
        folder: created when something is stored.
        model: the model's name, which keeps different models' arrays apart.
        tokenizer: folder or hub name of the model's tokenizer; None: that of the server's model, or the server itself.
    """

    def __init__(self, folder: Path, model: str, tokenizer: str | None = None) -> None:
        self.folder, self.model, self.tokenizer = folder, model, tokenizer
        self._lock = threading.Lock()
        self._loaded: Any = None
        #: Set once the reference's distributions are stored, or once it is known that they cannot be.
        self.reference_settled = threading.Event()
        self.reference_problem = ""

    # -- arrays -------------------------------------------------------------------------------------------

    def path(self, kind: str, key: Any) -> Path:
        return self.folder / f"{kind}-{digest([self.model, key])}{SUFFIX}"

    def has(self, kind: str) -> bool:
        """Returns whether anything of that kind is stored."""
        return any(self.folder.glob(f"{kind}-*{SUFFIX}"))

    def load(self, kind: str, key: Any) -> dict[str, np.ndarray] | None:
        path = self.path(kind, key)
        if not path.exists():
            return None
        return load_file(path)

    def store(self, kind: str, key: Any, arrays: dict[str, np.ndarray]) -> None:
        write_whole(self.path(kind, key), lambda file: file.write(save(arrays)), "wb")

    # -- tokens -------------------------------------------------------------------------------------------

    def tokens(self, key: Any, text: Callable[[], str], client: Client) -> np.ndarray:
        """Returns the ids of a text, int32 ``[n]``, without special tokens. ``key`` identifies the text."""
        return self._kept("tokens", key, lambda: self._tokenize(text(), client))

    def begin_token(self, client: Client) -> list[int]:
        """Returns the tokens that the tokenizer puts before a text: Llama's BOS, or none."""
        # Some tokenizers also add an end token, which must not precede a text.
        ids = self._kept(
            "begin", None, lambda: self._load_tokenizer(client)("", add_special_tokens=True)["input_ids"][:1]
        )
        return [int(token) for token in ids]

    def _kept(self, kind: str, key: Any, make: Callable[[], list[int]]) -> np.ndarray:
        """Returns the stored ids; calls ``make`` and stores its result if there are none."""
        with self._lock:
            arrays = self.load(kind, key)
            if arrays is None:
                arrays = {"ids": np.asarray(make(), np.int32)}
                self.store(kind, key, arrays)
            return arrays["ids"]

    def text(self, ids: np.ndarray, client: Client) -> str:
        with self._lock:
            return str(self._load_tokenizer(client).decode(ids.tolist()))

    def encode(self, text: str, client: Client) -> list[int]:
        """Returns the ids of a text, without special tokens; does not store them."""
        with self._lock:
            return self._tokenize(text, client)

    def _tokenize(self, text: str, client: Client) -> list[int]:
        return list(self._load_tokenizer(client)(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _load_tokenizer(self, client: Client) -> Any:
        """Returns the model's tokenizer, loaded once; uses the server's over HTTP if it is not on this machine."""
        if self._loaded is None:
            name = self.tokenizer or client.facts.model_path
            try:
                from transformers import AutoTokenizer

                self._loaded = AutoTokenizer.from_pretrained(name)
            except (ImportError, OSError, ValueError) as error:
                if self.tokenizer:
                    reason = (str(error).splitlines() or ["?"])[0]
                    raise KVQuantError(f"--tokenizer {name}: transformers cannot load it ({reason}).") from error
                self._loaded = _ServerTokenizer
        # Each call uses the current server's client, because the first server may have stopped.
        return self._loaded(client) if self._loaded is _ServerTokenizer else self._loaded

    # -- the reference ------------------------------------------------------------------------------------

    def settle_reference(self, problem: str = "") -> None:
        """Records that the reference's distributions are stored, or that ``problem`` prevents it."""
        if not self.reference_settled.is_set():
            self.reference_problem = problem
            self.reference_settled.set()


class _ServerTokenizer:
    """A tokenizer whose two calls are answered by a server."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool = False) -> dict[str, list[int]]:
        body = {"model": "default", "prompt": text, "add_special_tokens": add_special_tokens}
        return {"input_ids": self._ask("/tokenize", body)["tokens"]}

    def decode(self, ids: list[int]) -> str:
        return str(self._ask("/detokenize", {"model": "default", "tokens": ids})["text"])

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self.client.request(path, body)
        except RequestRefused as error:
            raise KVQuantError(
                f"the model's tokenizer is not on this machine, and the server does not answer for it ({error}). "
                "Pass --tokenizer FOLDER."
            ) from error
        return answer
