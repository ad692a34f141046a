"""A tokenizer for models without one: token 123 is the word "w123", so text and token ids correspond exactly.

SGLang's benchmark counts tokens in text, and its conversations are text, but servers of dummy weights have no
tokenizer. With this tokenizer no benchmark needs ``--skip-tokenizer-init``, and prompts have exactly the requested
lengths. The next turn of a conversation repeats the tokens of earlier turns, so that their pages are found in the
prefix cache.
"""

from __future__ import annotations

import json
from pathlib import Path

#: A conversation is the words of its messages, without role markers.
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_tokenizer(folder: Path, vocabulary: int) -> Path:
    """Writes a tokenizer of ``vocabulary`` words that transformers loads; returns its folder."""
    words = {f"w{token}": token for token in range(vocabulary)}
    # The tokenizers library's own format; adding as many words one by one would take seconds.
    split = {"type": "WhitespaceSplit"}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    content = {"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": split, "model": model}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
        "chat_template": TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
