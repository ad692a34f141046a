"""A tiny random model, a tokenizer of bytes, an embedder of words, and small data in the real data's formats."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.research.episodes.conversations import Conversation, Question, Writer
from benchmarks.research.episodes.runner import Runner
from benchmarks.research.episodes.segments import Turn
from sglang_kvq.sessions.embedding import Embedder

LAYERS, HEADS, KV_HEADS, VOCABULARY = 3, 4, 2, 256
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_llama(head_dim: int = 16, positions: int = 4096, attention: str = "eager") -> LlamaForCausalLM:
    """Returns the same random model at each call; its attention affects its logits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        max_position_embeddings=positions,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 12
        layer.self_attn.k_proj.weight.data *= 12
        layer.self_attn.v_proj.weight.data *= 8
        layer.self_attn.o_proj.weight.data *= 8
    model.lm_head.weight.data *= 10
    return model


def runner(**options: Any) -> Runner:
    return Runner(tiny_llama(**options))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def writer() -> Writer:
    """Returns a writer in which every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    return Writer(fast)


class Words:
    """An encoder that hashes a bag of words."""

    def encode(self, sentences: list[str], **options: Any) -> np.ndarray:
        rows = np.zeros((len(sentences), 64))
        for row, text in zip(rows, sentences):
            for word in text.lower().replace("?", " ").replace(".", " ").split():
                row[zlib.crc32(word.encode()) % 64] += 1
        return rows


def embedder() -> Embedder:
    return Embedder(Words())


SUBJECTS = ("boats", "bread", "stars", "trains", "bees", "maps")


def conversation(sessions: int = 6, turns: int = 6, name: str = "tiny") -> Conversation:
    """Returns a conversation with one subject per session, each with a number that a question asks for."""
    said: list[Turn] = []
    questions: list[Question] = []
    for session in range(sessions):
        subject = SUBJECTS[session % len(SUBJECTS)]
        for n in range(turns):
            text = f"more {subject} please" if n != 2 else f"the code of {subject} is {session}{session}7"
            if n == 2:
                questions.append(Question(f"What is the code of {subject}?", f"{session}{session}7", (len(said),)))
            said.append(Turn("AB"[n % 2], text, session, "May" if session else ""))
    return Conversation(name, tuple(said), tuple(questions))


def write_data(folder: Path, records: Sequence[str]) -> None:
    """Writes small versions of LoCoMo, LongChat and a sample text."""
    for name in ("locomo", "longchat", "shakespeare"):
        (folder / name).mkdir(parents=True)
    (folder / "shakespeare" / "text.txt").write_text("To be, or not to be, that is the question. " * 40)
    talks = []
    for sample in range(3):
        of = conversation(8, 5, f"talk-{sample}")
        raw: dict[str, Any] = {}
        for session in range(8):
            raw[f"session_{session + 1}_date_time"] = f"{session + 1} May"
            raw[f"session_{session + 1}"] = [
                {"speaker": turn.speaker, "dia_id": f"D{session + 1}:{n + 1}", "text": turn.text}
                for n, turn in enumerate(t for t in of.turns if t.session == session)
            ]
        qa = [
            {"question": q.text, "answer": q.answer, "evidence": [f"D{n + 1}:3"], "category": 1}
            for n, q in enumerate(of.questions)
        ]
        talks.append({"sample_id": of.name, "conversation": raw, "qa": qa})
    (folder / "locomo" / "locomo_first5.json").write_text(json.dumps(talks))
    for file in ("10_topics", "5_topics"):
        lines = [json.dumps({"test_id": n, "prompt": record}) for n, record in enumerate(records)]
        (folder / "longchat" / f"{file}.jsonl").write_text("\n".join(lines))


def record(*topics: str) -> str:
    """Returns a record in LongChat's form."""
    parts = ["Memorize each <TOPIC>. USER will say 'I would like to discuss the topic of <TOPIC>'. Now it starts."]
    for topic in topics:
        parts += [
            f"USER: I would like to discuss the topic of {topic}. \n ASSISTANT: Gladly. \n",
            f"USER: Why {topic}? \n ASSISTANT: Because. \n USER: Since when is {topic} known? \n ASSISTANT: Long. \n",
            f"USER: Great, this is the end of our discussion on the topic {topic}, let's talk about the next topic. \n",
        ]
    return " ".join(parts) + " Now the record ends. What is the first topic we discussed? Only give me the topic name."
