"""A tiny random Qwen2.5-VL as a checkpoint, with its tokenizer and processor: images take places among words.

Its text weights are those of ``benchmarks.tiny_models``, so that answers depend on the cache; an image's embeddings are
as large as those of words. Positions have three axes (M-RoPE).
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks.tiny_models import VOCABULARY, TinyModel

TEXT = TinyModel("vision", "qwen2", head_dim=64, hidden=512)
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
#: The last ids of the vocabulary.
SPECIAL = {name: VOCABULARY - 4 + n for n, name in enumerate((START, END, IMAGE, VIDEO))}
#: Pixels of an image's side, and the tokens that it becomes.
SIDE, PATCH, MERGED = 448, 14, 2
IMAGE_TOKENS = (SIDE // PATCH // MERGED) ** 2
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 128,
    "out_hidden_size": TEXT.hidden,
    "patch_size": PATCH,
    "spatial_merge_size": MERGED,
    "temporal_patch_size": 2,
    "window_size": 8 * PATCH,
    "fullatt_block_indexes": [1],
}


def write(folder: Path, seed: int = 0) -> Path:
    """The checkpoint in ``folder/vision``."""
    target = folder / TEXT.name
    target.mkdir()
    save_file(tensors(seed), target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config(), indent=1))
    processor().save_pretrained(target)
    return target


def config() -> dict:
    text = {name: value for name, value in TEXT.config().items() if name != "architectures"}
    text |= {"model_type": "qwen2_5_vl_text", "tie_word_embeddings": False}
    text["rope_parameters"] = {
        "rope_type": "default",
        "mrope_section": [8, 12, 12],
        "rope_theta": text.pop("rope_theta"),
    }
    ids = {"vision_start": START, "vision_end": END, "image": IMAGE, "video": VIDEO}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"model_type": "qwen2_5_vl", **VISION},
        **{f"{name}_token_id": SPECIAL[token] for name, token in ids.items()},
    }


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Weights by their names in a checkpoint, BF16."""
    draw = torch.Generator().manual_seed(seed + 1)
    wide, inner, merged = VISION["hidden_size"], VISION["intermediate_size"], VISION["hidden_size"] * MERGED**2

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> dict[str, torch.Tensor]:
        weight = torch.randn(rows, columns, generator=draw) * gain * columns**-0.5
        return {f"{name}.weight": weight, f"{name}.bias": torch.zeros(rows)}

    patch = torch.randn(wide, 3, 2, PATCH, PATCH, generator=draw) * (3 * 2 * PATCH**2) ** -0.5
    found = {"visual.patch_embed.proj.weight": patch}
    for block in range(VISION["depth"]):
        at = f"visual.blocks.{block}"
        found |= {f"{at}.norm{n}.weight": torch.ones(wide) for n in (1, 2)}
        found |= linear(f"{at}.attn.qkv", 3 * wide, wide) | linear(f"{at}.attn.proj", wide, wide)
        for name, rows, columns in (("gate", inner, wide), ("up", inner, wide), ("down", wide, inner)):
            found |= linear(f"{at}.mlp.{name}_proj", rows, columns)
    found["visual.merger.ln_q.weight"] = torch.ones(wide)
    found |= linear("visual.merger.mlp.0", merged, merged) | linear("visual.merger.mlp.2", TEXT.hidden, merged, 1.7)
    return TEXT.tensors(seed) | {name: tensor.bfloat16() for name, tensor in found.items()}


def processor():
    """Words ``w0``, ``w1``, ... are the ids 0, 1, ...; images are not resized."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    words = {f"w{i}": i for i in range(VOCABULARY - len(SPECIAL))} | SPECIAL
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="w1", pad_token="w0", additional_special_tokens=list(SPECIAL)
    )
    sizes = {"patch_size": PATCH, "merge_size": MERGED, "temporal_patch_size": 2}
    return Qwen2_5_VLProcessor(Qwen2VLImageProcessor(**sizes), tokenizer, Qwen2VLVideoProcessor(**sizes))


def image(seed: int) -> str:
    """A picture of colored squares, as a data URL."""
    squares = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(squares).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def text(before: list[int], after: list[int]) -> str:
    """A prompt with one image between words."""
    words = [" ".join(f"w{i}" for i in ids) for ids in (before, after)]
    return f"{words[0]} {START} {IMAGE} {END} {words[1]}"
