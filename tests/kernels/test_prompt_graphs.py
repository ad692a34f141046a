"""Whole prefills of short prompts in one CUDA graph do what SGLang's graphs, with attention between them, do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.attention import fa3, triton_ops
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.planning.extend_costs import ExtendCosts
from sglang_kvq.attention.planning.short_extend import ShortExtends
from sglang_kvq.attention.ragged import RaggedPrefill
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.triton_tiers import TritonTierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from tests.kernels.scene import ON_GPU
from tests.kernels.test_ragged import FA3_STANDIN, ROUNDING

DEVICE = "cuda" if ON_GPU else "cpu"
LAYERS, Q_HEADS, KV_HEADS, D, ROWS, PAGES = 2, 4, 2, 128 if ON_GPU else 64, 40, 8
WIDTHS = [Q_HEADS * D, KV_HEADS * D, KV_HEADS * D]
SINKS, RECENT = 1, 1
#: Relative error of two results that are both rounded to BF16.
ROUNDING_TWICE = 2 * ROUNDING
MODE = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: False, is_target_verify=lambda: False)


class Key(SimpleNamespace):
    """SGLang's key of a graph."""

    __hash__ = object.__hash__


class Model:
    """Layers of attention over one cache, whose inputs are in buffers, as in SGLang's graphs of ``size`` tokens.

    ``runner`` takes the place of SGLang's object that captures ``forward`` and replays it.
    """

    capturing: Model

    def __init__(self, size: int, whole: bool, short: ShortExtends | None = None) -> None:
        from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

        from sglang_kvq.sglang.attention.backend import KVQuantBackend

        draw = torch.Generator().manual_seed(1)
        table = torch.zeros(ROWS, PAGES * P, dtype=torch.int32)
        for row in range(1, ROWS):
            table[row] = ((row - 1) * PAGES + 1) * P + torch.arange(PAGES * P)
        self.pool = PagePool.allocate(
            [PageFormat(D, D)] * LAYERS, kv_heads=KV_HEADS, pages=ROWS * PAGES, slots=150, req_to_token=table.to(DEVICE)
        )
        turn = torch.linalg.qr(torch.randn(LAYERS, 1, D, D, generator=draw))[0].to(DEVICE)
        library = fa3.load(torch.device(DEVICE), D)[0] if ON_GPU else FA3_STANDIN
        prefill = RaggedPrefill(library, Q_HEADS, KV_HEADS, D, torch.device(DEVICE), 8 * P)
        self.ops = TritonOps(self.pool, LayerRotations(k=turn), Q_HEADS, max_batch=ROWS, prefill=prefill, short=short)
        self.tiers = TritonTierManager(self.pool, SINKS, RECENT, self.ops.quantize_slots)
        self.backend = KVQuantBackend(self.ops, self.tiers, range(LAYERS))
        self.size, self.whole = size, whole
        self.eager = 0  # how often SGLang's graphs, with attention between them, were replayed
        self.inputs = torch.zeros(LAYERS, size, sum(WIDTHS), dtype=torch.bfloat16, device=DEVICE)
        self.loc = torch.zeros(size, dtype=torch.int64, device=DEVICE)
        self.raw = size  # tokens without padding: what SGLang hands to attention between graphs
        self.runner = SimpleNamespace(
            _model_runner=SimpleNamespace(attn_backend=self.backend),
            _graphs={},
            _outputs={},
            _copy_output_to_buffer=lambda *x: BreakableCudaGraphBackend._copy_output_to_buffer(None, *x),
            _output_rows=lambda output, most: len(output),
            _debug_eager=False,
            _pool=None,
            _capture_stream=torch.cuda.Stream() if ON_GPU else None,
        )

    def forward(self) -> torch.Tensor:
        results = []
        for layer, inputs in enumerate(self.inputs):
            out = torch.zeros(self.size, Q_HEADS * D, dtype=torch.bfloat16, device=DEVICE)
            batch = self.backend.batch
            n = self.raw if batch.bounds is None and batch.tables is None else self.size
            q, k, v = inputs[:n].split(WIDTHS, 1)
            of = SimpleNamespace(head_dim=D, layer_id=layer, scaling=D**-0.5, k_scale=None, v_scale=None)
            got = self.backend.forward_extend(q, k, v, of, SimpleNamespace(forward_mode=MODE, _attn_output=out[:n]))
            out[:n] = got
            results.append(out)
        return torch.stack(results, 1)

    def capture(self) -> None:
        from sglang_kvq.sglang.attention.prompt_graphs import around_capture_one

        graphs, outputs = self.runner._graphs, self.runner._outputs
        self.key = Key(size=self.size, variant_label=None)

        def sglangs(runner, key, forward_fn, capture_inputs=None, post_warmup_hook=None):
            def replay():
                self.eager += 1
                outputs[key].copy_(forward_fn())

            outputs[key] = torch.zeros(self.size, LAYERS, Q_HEADS * D, dtype=torch.bfloat16, device=DEVICE)
            graphs[key] = SimpleNamespace(replay=replay, _break_fns=[None] * LAYERS)

        Model.capturing = self
        self.plan([0], [0], [self.size])
        if self.whole:
            around_capture_one(sglangs, self.runner, self.key, self.forward)
        else:
            sglangs(self.runner, self.key, self.forward)
        if self.ops._graph_space is not None:
            self.ops._graph_space.fill_(torch.nan)  # no result may depend on rows that no batch has written

    def plan(self, rows: list[int], stored: list[int], new: list[int]) -> None:
        """Fills the buffers that SGLang fills and plans the batch."""
        loc = [self.pool.req_to_token[row, p : p + n] for row, p, n in zip(rows, stored, new) if row]
        self.raw = sum(new)
        self.loc.zero_()
        if loc:
            self.loc[: self.raw] = torch.cat(loc)
        batch = SimpleNamespace(
            forward_mode=MODE,
            req_pool_indices=torch.tensor(rows, device=DEVICE),
            extend_prefix_lens_cpu=stored,
            extend_seq_lens_cpu=new,
            out_cache_loc=self.loc,
        )
        self.backend.init_forward_metadata_out_graph(batch)

    def prefill(self, rows: list[int], stored: list[int], new: list[int], seed: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        self.inputs.fill_(99.0)
        self.inputs[:, : sum(new)] = torch.randn(LAYERS, sum(new), sum(WIDTHS), generator=draw).bfloat16()
        self.plan(rows, stored, new)
        self.runner._graphs[self.key].replay()
        return self.runner._outputs[self.key][: sum(new)].clone()


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, a captured function runs again instead, over the batch of its capture."""
    if ON_GPU:
        return
    from sglang_kvq.sglang.attention import prompt_graphs

    monkeypatch.setattr(triton_ops, "_GRAPH_SPACE", 20 * P)

    def captured(run, pool, stream):
        backend = Model.capturing.backend
        held = {name: getattr(backend, name) for name in ("batch", "direct_pages", "fresh", "decoding", "scored")}
        assert (held["batch"].bounds is None) != (held["batch"].tables is None)

        def replay():
            planned = {name: getattr(backend, name) for name in held}
            vars(backend).update(held)
            run()
            vars(backend).update(planned)

        return replay

    monkeypatch.setattr(prompt_graphs, "captured", captured)


def pair(size: int, short: ShortExtends | None = None) -> tuple[Model, Model]:
    models = Model(size, True, short), Model(size, False, short)
    for model in models:
        model.capture()
    return models


def stored(model: Model) -> list[torch.Tensor]:
    pool = model.pool
    return [pool.bf16_pages[:, 1:], *(records[1:] for records in pool.records), pool.page_slot, model.tiers.row_len]


def check_answers(got: torch.Tensor, want: torch.Tensor, new: list[int], parts: Model) -> None:
    """Answers are equal if both call the library; outside graphs, shorter prompts have our own kernel."""
    assert (got.float() - want.float()).norm() <= ROUNDING_TWICE * want.float().norm(), new
    assert torch.equal(got, want) or not parts.ops.prefill.suits(new), new


BATCHES = [[256], [200], [64, 65, 1], [1] * 33, [5] * 32]


def test_answers_and_pages_are_those_of_sglangs_graphs(uncaptured, monkeypatch):
    """Bit for bit, for lone prompts, several, and padding; longer prompts also quantize pages directly."""
    monkeypatch.setattr(TritonOps, "graph_tables", lambda *sizes: [])  # only new prompts
    whole, parts = pair(4 * P)
    assert whole.runner._graphs[whole.key].graphs[0]._direct.shape[1] == 2
    for seed, new in enumerate(BATCHES):
        for model in (whole, parts):
            model.tiers.pending.free_rows(list(range(1, ROWS)))
        rows = list(range(1, len(new) + 1))
        eager = whole.eager
        got, want = (model.prefill(rows, [0] * len(new), new, seed) for model in (whole, parts))
        assert (whole.eager > eager) == (len(new) > 32), "more requests than a graph has"
        check_answers(got, want, new, parts)
        for mine, theirs in zip(stored(whole), stored(parts)):
            assert torch.equal(mine, theirs), new
    for model in (whole, parts):
        check_integrity(model.tiers)


#: Reads stored pages directly whenever it can.
DIRECT = ShortExtends(costs=None, least_prefix=1)
#: The graph's size, and each request's tokens stored before and new ones: a page that is quantized directly, broken
#: pages, a history, padding, and as many requests as a graph has.
CONTINUED = [
    (2 * P, [2 * P], [2 * P]),
    (P, [2, 2 * P + 5, 0], [1, 20, 30]),
    (P, [2] * 32, [1] * 32),
]


#: The same for graphs that dequantize first. Outside of them, the library attends only if prompts are long enough.
DEQUANTIZED = [
    (P, [2 * P], [P]),
    (3 * P, [2, 2 * P + 5], [70, 64]),
]


@pytest.mark.parametrize(
    ("size", "before", "new", "short"),
    [(*case, DIRECT) for case in CONTINUED] + [(*case, None) for case in DEQUANTIZED],
)
def test_continued_prompts_are_answered_as_by_sglangs_graphs(uncaptured, monkeypatch, size, before, new, short):
    """Bit for bit; padding changes nothing."""
    if short is None:
        monkeypatch.setattr(triton_ops, "_LEAST_DEQUANTIZED", P)
    whole, parts = pair(size, short)
    rows = list(range(1, len(new) + 1))
    for model in (whole, parts):
        if len(rows) > 1:
            model.prefill(rows, [0] * len(rows), [min(count, 2) for count in before], 100)
        for row, count in zip(rows, before):
            for first in range(0 if len(rows) == 1 else 2, count, size):
                model.prefill([row], [first], [min(count - first, size)], 100 + row)
    for mine, theirs in zip(stored(whole), stored(parts)):
        mine.copy_(theirs)  # what both read is equal, whatever wrote it
    eager = whole.eager
    got, want = (model.prefill(rows, before, new, 1) for model in (whole, parts))
    assert whole.eager == eager, "runs in one graph"
    assert torch.equal(got, want)
    assert whole.runner._outputs[whole.key].isfinite().all(), "padding goes through the layers after attention"
    for mine, theirs in zip(stored(whole), stored(parts)):
        assert torch.equal(mine, theirs)
    for model in (whole, parts):
        check_integrity(model.tiers)


@pytest.mark.skipif(ON_GPU, reason="kernels run on streams that are not stand-ins; the tests above compare results")
def test_tokens_are_stored_on_a_branch_that_each_layer_and_the_graph_join(uncaptured, monkeypatch):
    """A layer joins the branch before it starts its own work there; what the branch reads is kept until then."""
    from sglang_kvq.sglang.attention import prompt_graphs

    log: list[object] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"to {stream.name}")
        yield
        log.append("back")

    model = Model(4 * P, True, DIRECT)
    ops, held = model.ops, []

    def noted(name: str):
        call = getattr(ops, name)

        def run(*args):
            log.append(name)
            held.append((name, ops._read, args))
            return call(*args)

        return run

    for name in ("keep_tokens", "rotate_and_keep", "quantize_tokens", "extend"):
        monkeypatch.setattr(ops, name, noted(name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(prompt_graphs, "captured", lambda run, pool, stream: (log.clear(), held.clear(), run()))
    ops._branch = Stream("branch")
    model.plan([0], [0], [model.size])
    run = lambda: (model.forward(), ops.join())  # noqa: E731
    prompt_graphs.NewPrompts(model.backend, model.size).capture(run, None, None)
    layer = ["branch waits for main", "to branch", "keep_tokens", "quantize_tokens", "back", "extend"]
    assert log == [*layer, "main waits for branch", *layer, "main waits for branch"]
    for name, read, args in held:
        assert read is None or (
            name == "extend" and all(mine is given for mine, given in zip(read, args[2:4], strict=True))
        )
    assert sum(read is not None for _, read, _ in held) == LAYERS
    assert ops._read is None and not ops._capturing
    log.clear()
    run()
    assert log == LAYERS * ["keep_tokens", "quantize_tokens", "extend"], "outside a capture there is no branch"
    (tables, *_) = ops.graph_tables(model.size, 32)
    prompt_graphs.ContinuedPrompts(model.backend, model.size, tables).capture(run, None, None)
    layer = ["rotate_and_keep", "branch waits for main", "to branch", "quantize_tokens", "back", "extend"]
    whole = [*layer, "main waits for branch", *layer, "main waits for branch"]
    assert log == whole
    model.capture()
    assert log == whole, "as the hook captures the last of the graphs"


def test_long_and_many_continued_prompts_keep_sglangs_graphs(uncaptured):
    """The direct kernel suits batches for which it is about as fast as dequantizing first."""
    whole = Model(P, True, ShortExtends(costs=ExtendCosts(direct=(1e3, 0, 0), dequantized=(0,) * 6), least_prefix=1))
    whole.capture()
    assert len(whole.runner._graphs[whole.key].graphs) == 2
    whole.prefill([1], [0], [P], 1)
    assert whole.eager == 0
    whole.prefill([1], [P], [1], 2)
    assert whole.eager == 1
    whole.ops.short = DIRECT
    waits: list[int] = []
    counter = SimpleNamespace(wait_until=waits.append)
    whole.backend.token_to_kv_pool = SimpleNamespace(layer_transfer_counter=counter)
    whole.prefill([1], [P + 1], [1], 3)
    assert whole.eager == 1 and waits[0] == LAYERS - 1, "pages of all layers must be there before the graph runs"
    whole.prefill(list(range(1, 34)), [P] + [0] * 32, [1] * 33, 4)
    assert whole.eager == 2


def test_batches_take_the_graph_of_the_faster_way(uncaptured, monkeypatch):
    """A batch whose pages are too many for the workspace takes the other graph, unless that one is much slower."""
    monkeypatch.setattr(triton_ops, "_GRAPH_SPACE", 3 * P)
    monkeypatch.setattr(triton_ops, "_LEAST_DEQUANTIZED", P)
    whole = Model(P, True, DIRECT)
    whole.capture()
    taken: list[int] = []
    for number, graph in enumerate(whole.runner._graphs[whole.key].graphs):
        monkeypatch.setattr(graph, "replay", lambda number=number, go=graph.replay: (taken.append(number), go()))
    whole.ops.slab_pages = 2  # many KV heads: only the graphs of few tokens have a workspace
    monkeypatch.setattr(triton_ops, "_MOST_DIRECT", 2 * P)
    assert [len(whole.ops.graph_tables(tokens, 32)) for tokens in (P, 2 * P, 2 * P + 1)] == [2, 1, 0]
    for direct, prefix, graph in [(10, P, 2), (30, 2 * P, 1), (30, 2 * P + 1, 2), (121, 2 * P + 1, None)]:
        whole.ops.short = ShortExtends(
            costs=ExtendCosts(direct=(direct, 0, 0), dequantized=(20,) + (0,) * 5), least_prefix=1
        )
        taken.clear()
        eager = whole.eager
        whole.prefill([1], [prefix], [P], 1)
        assert taken == ([] if graph is None else [graph]) and whole.eager == eager + (graph is None)


def test_batches_with_a_stored_prefix_keep_sglangs_graphs(uncaptured):
    whole, parts = pair(2 * P)
    for seed, (before, new) in enumerate([([0, 0], [64, 30]), ([64, 0], [60, 60]), ([0], [128])]):
        rows = list(range(1, len(new) + 1)) if seed < 2 else [3]
        eager = whole.eager
        got, want = (model.prefill(rows, before, new, seed) for model in (whole, parts))
        assert (whole.eager > eager) == any(before)
        check_answers(got, want, new, parts)


@pytest.mark.parametrize(
    "case", ["large", "prefix variant", "another break", "library", "subclass", "data parallel", "eager"]
)
def test_what_cannot_be_captured_keeps_sglangs_graphs(uncaptured, monkeypatch, case):
    from sglang_kvq.sglang.attention import prompt_graphs
    from sglang_kvq.sglang.attention.backend import KVQuantBackend

    graph = SimpleNamespace(_break_fns=[None] * (LAYERS + (case == "another break")), replay=None)
    model = Model(P, True)
    model.runner._debug_eager = case == "eager"
    if case == "library":
        model.ops.in_graphs = False
    if case == "subclass":
        model.backend.__class__ = type("Capture", (KVQuantBackend,), {})
    key = SimpleNamespace(size=2304 if case == "large" else P, variant_label="x" if case == "prefix variant" else None)
    model.runner._graphs = Fixed(graph)
    inputs = object() if case == "data parallel" else None
    prompt_graphs.around_capture_one(lambda *x: None, model.runner, key, model.forward, inputs)
    assert model.runner._graphs.value is graph


def test_sglangs_objects_have_what_the_hook_uses():
    from sglang.srt.model_executor.runner_backend import breakable_cuda_graph_backend as sglangs

    used = "_model_runner _graphs _outputs _pool _capture_stream _debug_eager _copy_output_to_buffer _output_rows"
    source = inspect.getsource(sglangs.BreakableCudaGraphBackend)
    assert all(re.search(rf"(self\.|def ){name}\b", source) for name in used.split())
    assert "self._break_fns" in inspect.getsource(sglangs.BreakableCUDAGraph)


class Fixed:
    """A mapping with one value, whatever the key."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __getitem__(self, key: object) -> object:
        return self.value

    def __setitem__(self, key: object, value: object) -> None:
        self.value = value
