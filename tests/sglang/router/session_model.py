"""Stand-ins for SGLang's TokenizerManager and for an embedder, with a real session router on top."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sessions.config import EpisodicConfig
from sglang_kvq.sessions.embedding import Embedder
from sglang_kvq.sessions.messages import SELECTION
from sglang_kvq.sglang.router import router as session_router
from sglang_kvq.sglang.router.metrics import NoMetrics
from sglang_kvq.sglang.runtime import attach

BUDGET = 10 * P
EPISODIC = EpisodicConfig("retrieve", BUDGET, 2 * P, "folder", 2 * P, sessions=3, idle_seconds=0)
CONFIG = KVQuantConfig("int4", recent_tokens=2 * P, episodic=EPISODIC)


def request_of(**fields):
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(**{"input_ids": list(range(9)), **fields})


def http(**headers):
    async def is_disconnected() -> bool:
        return False

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return SimpleNamespace(headers=named, is_disconnected=is_disconnected)


#: A prompt longer than the budget, and the HTTP request of session "a".
LONG = np.arange(1, 2001, dtype=np.int32)
NAME = http(X_Session_Id="a")


class Words:
    """Stand-in for an embedder: counts a text's numbers by their hundreds, and remembers texts of whole pages."""

    def __init__(self):
        self.pages = []

    def encode(self, sentences, **options):
        self.pages += [text for text in sentences if len(text.split()) == P]
        rows = np.zeros((len(sentences), 40), np.float32)
        for row, text in zip(rows, sentences):
            row[39] = 1e-3
            for word in text.split():
                row[int(word) // 100 % 39 if word.isdigit() else 39] += 1
        return rows


class Counted(NoMetrics):
    """Metrics that tests can read."""

    def __init__(self):
        self.state, self.read, self.rebuilds, self.tokens = (0, 0), [], 0, 0

    def known(self, sessions, state_bytes):
        self.state = sessions, state_bytes

    def answered(self, read):
        self.read.append(read)

    def rebuilt(self):
        self.rebuilds += 1

    def computed(self, tokens):
        self.tokens += tokens


def pages_of(message: str) -> int:
    """Returns how many pages a selection names, without reading its history, which the event loop must not read."""
    return len(json.loads(message[: message.index("\n")])[2])


class Manager:
    """Stand-in for a TokenizerManager that records requests; ``script`` may return an error for one."""

    context_len, incremental_streaming_output, preferred_sampling_params = 4096, False, None
    #: Seconds before a request is answered.
    pause = 0.0

    def __init__(self, script=None, config=CONFIG, **episodic):
        self.server_args = SimpleNamespace()
        config = replace(config, episodic=replace(config.episodic, **episodic))
        attach(config, self.server_args)
        self.tokenizer = SimpleNamespace(decode=lambda ids, **options: " ".join(map(str, ids)))
        self.script, self.sent, self.aborted, self.rid_to_state = script, [], [], {}
        self.words = Words()
        self._kvq_router = session_router.Router(self, config, config.episodic, Embedder(self.words))

    @property
    def router(self) -> session_router.Router:
        return self._kvq_router

    def counted(self) -> Counted:
        """Lets the router count, and returns what counts."""
        router, counted = self.router, Counted()
        for one in filter(None, (router, router.workers, router.episodes)):
            one.metrics = counted
        return counted

    def _validate_one_request(self, obj, ids):
        if len(ids) >= self.context_len:
            raise ValueError("longer than the model's context length")

    def abort_request(self, rid="", abort_all=False):
        session_router.before_abort(self, rid, abort_all)
        self.aborted.append(rid)

    async def generate_request(self, obj, request=None):
        self.sent.append(obj)
        obj.normalize_batch_and_arguments()
        self.rid_to_state[obj.rid] = SimpleNamespace(obj=obj)
        await asyncio.sleep(self.pause)
        if self.script is not None and (error := self.script(obj)) is not None:
            raise error
        custom = obj.sampling_params.get("custom_params", {})
        out = {
            "text": "x",
            "output_ids": [7, 8],
            "meta_info": {
                "id": obj.rid,
                "prompt_tokens": len(obj.input_ids or ()),
                "cached_tokens": pages_of(custom[SELECTION]) * P if custom else 0,
                "finish_reason": {"type": "length"},
            },
        }
        del self.rid_to_state[obj.rid]
        yield out

    @property
    def session(self):
        return self.router.store.get("", "a")

    async def heard(self, obj, request=NAME, send=None):
        """Returns all chunks after background work has ended; ``send`` replaces this class's answers."""
        send = send or type(self).generate_request
        found = [out async for out in session_router.around_generate_request(send, self, obj, request)]
        while self.router.background:
            await asyncio.sleep(0.01)
        return found

    async def turn(self, ids, request=NAME, **fields):
        return await self.heard(request_of(input_ids=[int(token) for token in ids], **fields), request)

    def ask(self, ids, request=NAME, **fields):
        return asyncio.run(self.turn(ids, request, **fields))
