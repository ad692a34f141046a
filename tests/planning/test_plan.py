"""``kvq plan`` gives the figures of measured servers, advice that meets the request, and errors in one line."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from sglang_kvq.cache.layout import contexts_within
from sglang_kvq.cli import app
from sglang_kvq.config import DEFAULT_BUDGET, KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.planning import plan as plan_module
from sglang_kvq.planning.command import parse_tokens
from sglang_kvq.planning.gpus import GIB, KNOWN, find_gpu
from sglang_kvq.planning.plan import Place, Planner, Row, Wish
from sglang_kvq.planning.weights import Weights, find_weights
from sglang_kvq.releases import NEW_TREE
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.doctor.model import Request, read_config
from tests.conftest import ROOT

new_tree = pytest.mark.skipif(
    not compat.applies(NEW_TREE, compat.sglang_version()), reason="older releases divide the memory once"
)
MODELS = ROOT / "benchmarks" / "models"
QWEN3 = str(MODELS / "qwen3-8b")
#: Measured results, by the GPU's name.
RESULTS = {
    path.stem.removeprefix("serving_"): json.loads(path.read_text())
    for path in (ROOT / "benchmarks" / "results").glob("serving_*.json")
    if path.stem.removeprefix("serving_") in KNOWN
}
#: Scenario, model, method and bits of each capacity that a file may have.
CAPACITIES = (
    ("capacity", "qwen3-8b", "oscar", None),
    ("capacity transform 1.6", "qwen3-8b", "transform", "1.6"),
    ("qwen3-30b-a3b/tokens", "qwen3-30b-a3b", "oscar", None),
)
#: Rows of loaded servers, which also report tokens (``benchmarks/workloads.py``), and their methods.
LOADED = (("bench 1k, none", "none"), ("bench 1k, oscar", "oscar"))
#: Rows of servers on one and on two H200s.
TWO_GPUS = json.loads((ROOT / "benchmarks" / "results" / "serving_tp_h200.json").read_text())["rows"]
#: Rows of a server whose memory is shared.
SHARED = json.loads((ROOT / "benchmarks" / "results" / "serving_all_h100.json").read_text())["rows"]
SERVERS = [
    (gpu, *capacity)
    for gpu, file in sorted(RESULTS.items())
    for capacity in CAPACITIES
    if capacity[0] in {row["scenario"] for row in file["rows"]}
]


def measured(scenario: str, gpu: str = "h200") -> dict:
    return next(row for row in RESULTS[gpu]["rows"] if row["scenario"] == scenario)


def planner(name: str, gpu: str = "h200", wish: Wish | None = None, weights: Weights | None = None, **place) -> Planner:
    path = str(MODELS / name)
    model, _ = read_config(Request(path, KVQuantConfig("hadamard")))
    return Planner(path, model, weights or find_weights(path, model.hf_config), Place(find_gpu(gpu), **place), wish)


def divided_once(plan: Planner, method: str, bits: str | None) -> Row:
    """Returns a method's row for a server that divides its memory once, like the measured ones."""
    config = KVQuantConfig(method, bits=bits, bf16_budget=DEFAULT_BUDGET)
    return plan._method_row(config, plan._geometry(config))


def ask(*argv: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *argv])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def found(*argv: str) -> dict:
    return json.loads(ask(*argv, "--json")[1])


def row_of(plan: dict, name: str) -> dict:
    return next(row for row in plan["rows"] if row["name"] == name)


@pytest.mark.parametrize(("gpu", "scenario", "model", "method", "bits"), SERVERS)
def test_figures_are_those_of_servers(gpu, scenario, model, method, bits):
    """Figures from the GPU's name and the config are within 2% of servers with --mem-fraction-static 0.85."""
    assert gpu.upper() in RESULTS[gpu]["device"]
    server, plan = measured(scenario, gpu), planner(model, gpu)
    plain, ours = next(plan.plain_rows()), divided_once(plan, method, bits)
    assert plain.tokens == pytest.approx(server["none"], rel=0.02)
    assert ours.tokens == pytest.approx(server[method], rel=0.02)
    if "max_running_requests" in server:
        assert ours.requests == pytest.approx(server["max_running_requests"], rel=0.02)


@pytest.mark.parametrize(("scenario", "method"), LOADED)
def test_figures_are_those_of_loaded_servers_on_an_h100(scenario, method):
    server, plan = measured(scenario, "h100"), planner("qwen3-8b", "h100")
    row = next(plan.plain_rows()) if method == "none" else divided_once(plan, method, None)
    assert row.tokens == pytest.approx(server["cache_tokens"], rel=0.02)
    if method != "none":
        assert row.requests == pytest.approx(server["most_requests"], rel=0.02)


@new_tree
def test_figures_are_those_of_a_server_whose_memory_is_shared():
    server = next(row for row in SHARED if row["scenario"] == "bench 1k, oscar")
    row = planner("qwen3-8b", "h100").row_of("oscar", None)
    assert row.tokens == pytest.approx(server["cache_tokens"], rel=0.02) and row.budget is None
    assert row.requests == pytest.approx(server["most_requests"], rel=0.02)


def two_gpus() -> tuple[dict, Planner]:
    """Returns the tokens of servers on two H200s, and the plan for these."""
    server = next(row for row in TWO_GPUS if row["scenario"] == "tokens, 2 GPUs")
    return server, planner("qwen3-8b", count=2, tp=2)


@new_tree
def test_figures_are_those_of_servers_on_two_gpus():
    server, plan = two_gpus()
    assert next(plan.plain_rows()).tokens == pytest.approx(server["none"], rel=0.02)
    assert plan.row_of("oscar", None).tokens == pytest.approx(server["oscar"], rel=0.02)


@new_tree
def test_the_guides_table_is_what_the_plan_says_and_servers_had():
    page = (ROOT / "docs" / "deploying.md").read_text()
    number = re.compile(r"^\| (.*), (.*) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)
    said = {(model, method): (had, plan) for model, method, had, plan in number.findall(page)}
    names = {"oscar": "`oscar`", "transform": "`transform` at 1.6 bits"}
    found = {}
    for scenario, model, method, bits in CAPACITIES:
        server, plan, title = measured(scenario), planner(model), model.replace("qwen", "Qwen").replace("b", "B")
        for name, tokens, key in (
            ("BF16", next(plan.plain_rows()).tokens, "none"),
            (names[method], divided_once(plan, method, bits).tokens, method),
        ):
            found[title.replace("-a", "-A"), name] = f"{server[key]:,}", f"{tokens:,}"
    plan = planner("qwen3-8b", "h100")
    rows = {"none": next(plan.plain_rows()), "oscar": divided_once(plan, "oscar", None)}
    for scenario, method in LOADED:
        name = "BF16" if method == "none" else f"`{method}`"
        server = measured(scenario, "h100")["cache_tokens"]
        found["Qwen3-8B on an H100", name] = f"{server:,}", f"{rows[method].tokens:,}"
    server = next(row for row in SHARED if row["method"] == "oscar")["cache_tokens"]
    shared = f"{server:,}", f"{plan.row_of('oscar', None).tokens:,}"
    found["Qwen3-8B on an H100, `oscar`", "shared memory"] = shared
    server, plan = two_gpus()
    for key, name, tokens in (
        ("none", ("Qwen3-8B on two GPUs", "BF16"), next(plan.plain_rows()).tokens),
        ("oscar", ("Qwen3-8B on two GPUs, `oscar`", "shared memory"), plan.row_of("oscar", None).tokens),
    ):
        found[name] = f"{server[key]:,}", f"{tokens:,}"
    assert said == found


@pytest.mark.parametrize("method", ["none", "oscar"])
@pytest.mark.parametrize("scenario", ["decode_4x8k", "decode_4x16k", "decode_4x32k"])
def test_a_step_takes_longer_than_its_bound_but_not_much(scenario, method):
    batch, context = scenario.removeprefix("decode_").split("x")
    plan = planner("qwen3-8b", wish=Wish(parse_tokens("", context), int(batch)))
    row = next(plan.plain_rows()) if method == "none" else plan.row_of(method, None)
    assert 0.5 < row.step_ms / measured(scenario)[method] < 1


def test_eight_bits_hold_twice_the_tokens_of_sixteen():
    bf16, fp8 = planner("qwen3-8b").plain_rows()
    assert (fp8.name, fp8.tokens) == ("FP8", 2 * bf16.tokens) and fp8.at[4096] == fp8.tokens // 4096


def test_advice_serves_the_wish_with_the_most_bits_of_the_method():
    plan = found(QWEN3, "--gpu", "h200", "--context", "32K", "--concurrency", "100")
    best = plan["best"]
    assert best["serves"] and best["at"]["32768"] >= 100 and best["name"] == "transform" and best["rotations"] == ""
    calibrate, serve = map(shlex.split, best["commands"])
    assert calibrate[:3] == ["kvq", "calibrate", QWEN3] and "transform" in calibrate
    flags = dict(pairwise(serve))
    assert flags["--kv-quant"] == "transform" and flags["--kv-quant-bits"] == best["setting"]
    assert flags["--mem-fraction-static"] == "0.85" and flags.get("--kv-quant-bf16-budget") == (
        None if best["budget"] is None else f"{best['budget']:g}"
    )
    wider = planner("qwen3-8b", wish=Wish(32768, 100)).row_of("transform", f"{float(best['setting']) + 0.25:g}")
    assert not wider.serves
    assert not row_of(plan, "int4")["serves"] and row_of(plan, "int4")["bits"] > best["bits"]


@new_tree
def test_advice_goes_by_the_method_before_it_goes_by_bits():
    """Random rotations of 2.62 bits would serve this wish too; at such widths they lose far more (docs/methods.md)."""
    turboquant = planner("qwen3-8b", "h100", Wish(32768, 64)).row_of("turboquant", "2.5")
    best = found(QWEN3, "--gpu", "h100", "--context", "32K", "--concurrency", "64")["best"]
    assert turboquant.serves and best["name"] == "transform" and best["bits"] < turboquant.bits


def test_commands_of_a_model_with_windows_are_not_refused():
    """Only SGLang calibrates such models, and not for ``transform``."""
    wish = ("--gpu", "h200", "--weights", "61", "--context", "32K", "--concurrency", "150")
    best = found(str(MODELS / "gpt-oss-120b"), *wish)["best"]
    assert best["name"] == "oscar" and "--engine sglang" in best["commands"][0]
    assert "--composition" not in best["commands"][0]


def test_commands_run_the_models_code_if_the_plan_did():
    wish = ("--gpu", "h200", "--context", "32K", "--concurrency", "100")
    for more, wanted in (((), False), (("--trust-remote-code",), True)):
        commands = found(QWEN3, *wish, *more)["best"]["commands"]
        assert len(commands) == 2 and all(("--trust-remote-code" in line) == wanted for line in commands)


@new_tree
def test_a_shared_memory_serves_many_requests_without_a_budget():
    few, many = (planner("qwen3-8b", wish=Wish(4096, n)).row_of("hadamard", None) for n in (150, 900))
    assert few.serves and many.serves and few.budget is many.budget is None
    assert few.tokens == many.tokens and 900 <= many.at[4096] < many.requests
    assert not planner("qwen3-8b", wish=Wish(4096, many.at[4096] + 1)).row_of("hadamard", None).serves


@new_tree
def test_long_contexts_need_a_flag_for_many_requests(tmp_path):
    """Without the flag SGLang's table has rows for fewer requests, because a row is as long as the context."""
    config = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 20}))
    wish = ("--gpu", "h100", "--count", "2", "--weights", "16", "--context", "4K", "--concurrency", "899")
    best = found(str(tmp_path), *wish)["best"]
    assert best["at"]["4096"] >= 899 > best["requests"]
    assert dict(pairwise(shlex.split(best["commands"][-1])))["--max-running-requests"] == "450"
    assert "--max-running-requests" not in found(QWEN3, *wish)["best"]["commands"][-1]


def test_budget_is_raised_for_many_requests_and_left_alone_otherwise(monkeypatch):
    """Checks a release that divides the memory once."""
    monkeypatch.setattr(compat, "sglang_version", lambda: Version("0.5.18"))
    few, many = (planner("qwen3-8b", wish=Wish(4096, n)).row_of("hadamard", None) for n in (150, 300))
    assert few.serves and few.budget == 0.1
    assert many.serves and 0.1 < many.budget < 0.3 and many.at[4096] >= 300 and many.tokens < few.tokens
    plan = planner("qwen3-8b", wish=Wish(4096, 300))
    config = KVQuantConfig("hadamard", bf16_budget=round(many.budget - 0.01, 2))
    assert not plan._method_row(config, plan._geometry(config)).serves, "a smaller budget would do"


def test_wish_that_nothing_serves():
    status, shown = ask(QWEN3, "--gpu", "h100", "--context", "32K", "--concurrency", "9000")
    assert status == 1 and "No method serves 9000 requests of 32K tokens. Add GPUs (--count)" in shown
    assert all(
        not row["serves"] for row in found(QWEN3, "--gpu", "h100", "--context", "32K", "--concurrency", "9000")["rows"]
    )


def test_a_memory_that_holds_no_window_is_said_once_and_the_other_rows_are_shown():
    left = planner("qwen3-8b", "80:3.35").memory / GIB
    weights = str(planner("qwen3-8b", "80:3.35").weights.total / GIB + left - 0.3)
    status, shown = ask(QWEN3, "--gpu", "80:3.35", "--weights", weights)
    assert status == 1 and shown.count("one request") == 1 and re.search(r"^oscar, .*int4: The KV cache", shown, re.M)
    rows = found(QWEN3, "--gpu", "80:3.35", "--weights", weights)["rows"]
    assert rows[0]["tokens"] > 2000 and not rows[0]["error"] and all(row["error"] for row in rows[2:])
    assert all(row["tokens"] == row["requests"] == sum(row["at"].values()) == 0 for row in rows[2:])


def test_one_methods_error_is_its_own(monkeypatch):
    def but_kivi(config, *given, capacity=plan_module.capacity):
        if config.method == "kivi":
            raise KVQuantError("no room for kivi.")
        return capacity(config, *given)

    monkeypatch.setattr(plan_module, "capacity", but_kivi)
    status, shown = ask(QWEN3, "--gpu", "h100", "--context", "4K", "--concurrency", "8")
    assert status == 0 and "kivi: no room for kivi." in shown and "  python -m sglang.launch_server" in shown


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_chunks_are_those_of_the_gpu(name, monkeypatch):
    chunks = []

    def note(*given, capacity=plan_module.capacity):
        chunks.append(given[-1])
        return capacity(*given)

    monkeypatch.setattr(plan_module, "capacity", note)
    planner("qwen3-8b", name).row_of("oscar", None)
    assert chunks == [{"a100-40gb": 4096, "b200": 16384, "l40s": 4096}.get(name, 8192)]


def test_gpus_that_share_a_model_and_copies_of_it():
    one, copies, shared = (
        found(QWEN3, "--gpu", "h100", *more) for more in ((), ("--count", "2"), ("--count", "2", "--tp", "2"))
    )
    bf16 = [row_of(plan, "BF16")["tokens"] for plan in (one, copies, shared)]
    assert bf16[1] == 2 * bf16[0]
    assert bf16[2] > 2 * bf16[0], "the weights are held once"
    wish = ("--context", "4K", "--concurrency", "8")
    for more, flag in ((("--count", "2"), "--dp 2"), (("--tp", "2"), "--tp 2")):
        assert found(QWEN3, "--gpu", "h100", *more, *wish)["best"]["commands"][-1].endswith(flag)


def test_text_has_a_row_each_and_the_command():
    status, shown = ask(QWEN3, "--gpu", "h200", "--context", "16K", "--concurrency", "32")
    assert status == 0
    for name in ("BF16", "FP8", "oscar", "transform", "int4", "at 4K", "at 32K", "32 x 16K"):
        assert name in shown
    assert "at 128K" not in shown, "beyond the model's context"
    assert shown.splitlines()[-1].startswith("  python -m sglang.launch_server --model-path")


def test_bits_of_transform_are_its_records_and_first_tokens():
    plan = planner("qwen3-8b")
    row, geometry = plan.row_of("transform", "2.5"), plan._geometry(KVQuantConfig("transform", bits="2.5"))
    assert geometry.record_bits_per_element <= 2.5 and row.bits == geometry.record_bits_per_element + 1 / 32
    shown = ask(QWEN3, "--gpu", "h200")[1]
    assert "transform's have 0.03 for first tokens in BF16" in shown


def test_names_are_whole_in_a_narrow_terminal():
    wide = ("--weights", "10", "--tp", "2", "--context", "4K", "--concurrency", "8")
    _, shown = ask(str(MODELS / "gpt-oss-120b"), "--gpu", "l40s", *wide)
    assert "oscar-lloyd-max " in shown and "budget 0.1 " in shown and "step, ms" in shown and "…" not in shown


def test_contexts_are_those_that_the_model_can_have():
    assert contexts_within(40960) == (4096, 32768) and contexts_within(1 << 20) == (4096, 32768, 131072)
    assert contexts_within(2048) == (2048,)


def test_hybrid_counts_states_and_experts():
    weights = Weights(160 << 30, 150 << 30, 0, "given")
    plan = planner("qwen3-next-80b-a3b", wish=Wish(32768, 64), weights=weights, tp=2, count=2)
    bf16, ours = next(plan.plain_rows()), plan.row_of("oscar", None)
    assert bf16.requests is not None and ours.requests > bf16.requests, "memory goes from the cache to states"
    small, large = (weights.read_by(n, plan.model.hf_text_config) for n in (1, 64))
    assert small == pytest.approx((10 + 150 * 10 / 512) * 2**30) and small < large < weights.total


def test_a_step_reads_a_requests_window_or_all_of_a_shorter_context():
    weights = Weights(10 << 30, 0, 0, "given")
    read = [planner("gpt-oss-120b", wish=Wish(n, 1), weights=weights).other_bytes for n in (64, 128, 4096)]
    assert 0 < 2 * read[0] == read[1] == read[2]


def test_weights_of_files_and_of_the_config_agree(model):
    read, _ = read_config(Request(str(model), KVQuantConfig("hadamard")))
    files = find_weights(str(model), read.hf_config)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert files.total == pytest.approx(size, rel=1e-3) and files.lookup == 0, "its embedding is its output layer"


def test_weights_are_counted_as_served(tmp_path):
    import torch
    from safetensors.torch import save_file

    tensors = {
        "model.embed_tokens.weight": torch.zeros(8, 4),
        "lm_head.weight": torch.zeros(8, 4, dtype=torch.bfloat16),
        "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(16, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    counted = Weights(64 + 64 + 16, 16, 64, "headers of its files")
    assert find_weights(str(tmp_path), None) == counted
    save_file({"tok_embeddings.weight": torch.zeros(8, 4)}, tmp_path / "consolidated.safetensors")  # the same once more
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_weights(str(tmp_path), None) == counted
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(KVQuantError, match="model.safetensors: damaged .*. Download it again"):
        find_weights(str(tmp_path), None)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpu", "h300"], "--gpu h300: unknown. Did you mean"),
        (["--gpu", "80:fast"], "--gpu 80:fast: must be its GiB and its TB/s"),
        (["--gpu", "1:1"], "--gpu 1:1: must be its GiB and its TB/s"),
        (
            ["--gpu", "20:1", "--mem-fraction-static", "0.5"],
            "leave no memory for the cache after 15.3 GiB of weights per GPU. Raise --tp",
        ),
        (["--gpu", "h100", "--tp", "3", "--count", "3"], "--tp 3: .* has 32 query heads, which 3 GPUs cannot share"),
        (["--gpu", "h100", "--tp", "2", "--count", "3"], "--count 3: must be a multiple of --tp 2"),
        (["--gpu", "h100", "--tp", "0"], "--tp 0: must be"),
        (["--gpu", "h100", "--mem-fraction-static", "85"], "--mem-fraction-static 85: must be above 0 and below 1"),
        (["--gpu", "h100", "--context", "32K"], "--context 32K: a load needs both. Add --concurrency"),
        (["--gpu", "h100", "--concurrency", "3"], "--concurrency 3: a load needs both. Add --context"),
        (["--gpu", "h100", "--context", "32Q", "--concurrency", "3"], "--context 32Q: must be a number of tokens"),
        (
            ["--gpu", "h100", "--context", "1M", "--concurrency", "3"],
            "--context 1M: .* supports at most 40,960 tokens. Choose 40,960 or less",
        ),
        (["--gpu", "h100", "--context", "1K", "--concurrency", "0"], "--concurrency 0: must be at least 1"),
        (["--gpu", "h100", "--weights", "0"], "--weights 0: must be the GiB"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_errors_are_one_line(argv, said):
    with pytest.raises(KVQuantError, match=said) as error:
        ask(QWEN3, *argv)
    assert "\n" not in str(error.value)


def test_models_that_are_not_served_or_not_known(tmp_path):
    config = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    for number, (changes, said) in enumerate((
        (dict(architectures=["SomethingElse"]), "SGLang has no class for it"),
        (dict(head_dim=80), "heads of 80 elements"),
        (dict(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}), "Pass --weights GIB"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(KVQuantError, match=said):
            ask(str(folder), "--gpu", "h100")
    with pytest.raises(KVQuantError, match=f"^{tmp_path}/nowhere: no such folder"):
        ask(str(tmp_path / "nowhere"), "--gpu", "h100")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(KVQuantError, match=f"^{tmp_path}: SGLang .* cannot read its config"):
        ask(str(tmp_path), "--gpu", "h100")


def test_gpus_are_known_by_name_or_described():
    assert set(KNOWN) >= {"h100", "h200"} and find_gpu("H100") == find_gpu("h100")
    assert find_gpu("80:3.35").bandwidth == 3.35e12 and find_gpu("80:3.35").memory < 80 << 30
