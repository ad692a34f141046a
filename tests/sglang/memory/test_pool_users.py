"""Every place in the installed SGLang that looks at a KV pool or an attention backend has been reviewed."""

from pathlib import Path

import pytest

from sglang_kvq.sglang import compat
from tests.sglang.attention.test_model_calls import backend, make_runner  # noqa: F401  (fixtures)
from tests.sglang.memory import pool_users_reviewed as reviewed
from tests.sglang.memory.pool_users import BACKEND, POOL, Call, Look, calls, looks

ENTER = "read the code there; make it right, or say in tests/sglang/memory/pool_users_reviewed.py why it is harmless"


@pytest.fixture(scope="module")
def source() -> Path:
    import sglang.srt.server_args

    return Path(sglang.srt.server_args.__file__).parent


@pytest.fixture(scope="module")
def found(source) -> list[Look]:
    return looks(source, skip=tuple(reviewed.NOT_SERVED))


def unreviewed(found: list[Look]) -> list[Look]:
    return [
        look
        for look in found
        if look.what.rstrip("?=") not in reviewed.SERVED[look.kind]
        and look.what not in reviewed.REVIEWED[look.kind].get(look.path, ("", ""))[0].split(", ")
    ]


def test_every_look_is_reviewed(found):
    assert len(found) >= 40  # with fewer, the reader no longer understands the source
    release = compat.sglang_version()
    texts = [f"{x.path}:{x.line} looks at a {x.kind}: {x.what}" for x in unreviewed(found)]
    assert not texts, f"SGLang {release}, {ENTER}:\n" + "\n".join(texts)


def test_what_is_looked_at_is_there(found, backend):  # noqa: F811
    ours = {POOL: backend.token_to_kv_pool, BACKEND: backend}
    served = {(x.kind, x.what) for x in found if x.what in reviewed.SERVED[x.kind]}
    assert {kind for kind, _ in served} == {POOL, BACKEND}
    assert [(kind, what) for kind, what in sorted(served) if not hasattr(ours[kind], what)] == []


def test_what_is_read_has_a_value(backend):  # noqa: F811
    """The pools have the values that SGLang reports, and both pools are the worker's own."""
    pool = backend.token_to_kv_pool
    assert (pool.size, pool.page_size, pool.device) == (16 * 64, 64, "cpu")
    assert pool.mem_usage == pytest.approx(pool.layout.total_bytes / 2**30)
    assert pool.post_capture_active is False and pool.maybe_get_custom_mem_pool() is None
    assert backend.req_to_token_pool.req_to_token is backend.tiers.pool.req_to_token


def test_every_call_of_an_attention_layer_is_reviewed(source):
    texts = [
        f"{call.path}:{call.line} calls attention with {call.what}"
        for call in calls(source, skip=tuple(reviewed.NOT_SERVED))
        if call.what not in reviewed.CALLS.get(call.path, ("", ""))[0].split(", ")
    ]
    assert not texts, f"SGLang {compat.sglang_version()}, {ENTER}:\n" + "\n".join(texts)


def test_every_entry_says_why():
    assert all(reviewed.NOT_SERVED.values())
    tables = (*reviewed.REVIEWED.values(), reviewed.CALLS)
    assert all(what and why for table in tables for what, why in table.values())


# -- the reader itself -------------------------------------------------------------------------------------------------

LOOKS = """
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

def sniff(forward_batch, kv: "KVCache"):
    pool = get_token_to_kv_pool()
    if pool.dtype == 1 and not isinstance(pool, SWAKVPool):
        return kv.k_buffer
    if hasattr(get_attn_backend(), "workspace"):
        return getattr(forward_batch.attn_backend, "split", None)
    if (p := forward_batch.token_to_kv_pool) is not None:
        p.counter = p.get_kv_buffer(3)
    return type(pool)

class Runner:
    def __init__(self, runner):
        self.cache = runner.token_to_kv_pool_allocator.get_kvcache()

    def use(self):
        return self.cache.head_num, self.token_to_kv_pool_allocator.free
"""


def test_the_reader_sees_every_way_to_look(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "one.py").write_text(LOOKS)
    assert [(x.kind, x.what) for x in looks(tmp_path)] == [
        (BACKEND, "split?"),
        (BACKEND, "workspace?"),
        (POOL, "counter="),
        (POOL, "dtype"),
        (POOL, "get_kv_buffer"),
        (POOL, "head_num"),
        (POOL, "is SWAKVPool"),
        (POOL, "k_buffer"),
        (POOL, "type()"),
    ]
    assert looks(tmp_path, skip=("models/",)) == []


def test_a_new_look_fails(found):
    """A model that starts to read the pool's dtype fails the review, and so does a new question to the backend."""
    new = [Look("models/llama.py", POOL, "dtype", 3), Look("models/utils.py", BACKEND, "fused_writer", 4)]
    assert unreviewed([*found, *new]) == new


CALLS = """
class Attention:
    def __init__(self):
        self.attn = RadixAttention(1)
        self.loops.append(RadixAttention(2))
        self.norm = Norm()

    def forward(self, q, k, v, forward_batch):
        self.norm(q, eps=1)
        self.attn(q, k, v, forward_batch)
        self.attn(q, k=k, v=v, forward_batch=forward_batch)
        self.attn(q, k, v, forward_batch, save_kv_cache=False, sinks=self.sinks)
        self.loops[1](q, None, None, forward_batch)
        return self.attn.forward(q, k, v, forward_batch, True, **self.more)

class Heir(Attention):
    def forward(self, q, k, v, forward_batch):
        return self.attn(q, k, v, forward_batch, q_rope=q)

class Other:
    def __init__(self):
        self.attn = Vision()

    def forward(self, q, forward_batch):
        return self.attn(q, mask=1)
"""


def test_the_reader_sees_every_call(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "one.py").write_text(CALLS)
    found = calls(tmp_path)
    assert [call.what for call in found] == ["**", "None", "more", "q_rope", "save_kv_cache", "sinks"]
    assert found[3] == Call("models/one.py", "q_rope", 18)
