"""Flags or a YAML file become a KVQuantConfig on ServerArgs, and change some settings of SGLang."""

import argparse
import pickle
from types import SimpleNamespace

import pytest

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.methods import METHOD_NAMES
from sglang_kvq.releases import NEW_TREE
from sglang_kvq.sglang import checks, compat, flags
from sglang_kvq.sglang.doctor.capacity import default_chunk
from sglang_kvq.sglang.runtime import config_of


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return parser


def test_flags_are_listed_with_their_defaults():
    text = " ".join(_parser().format_help().split())
    for name in ("First", "Last"):
        default = KVQuantConfig.sink_tokens if name == "First" else KVQuantConfig.recent_tokens
        assert f"{name} tokens of a request kept in BF16; a multiple of 64. Default: {default}." in text
    for flag in flags.FIELDS:
        assert "--" + flag.replace("_", "-") in text
    for method in METHOD_NAMES:
        assert method in text


def test_flags_are_added_once():
    parser = _parser()
    flags.add_flags(parser)
    assert parser.parse_args([]).kv_quant == "none"


def test_defaults_are_those_of_the_config():
    for method in METHOD_NAMES:
        assert flags.parse_config(vars(_parser().parse_args(["--kv-quant", method]))) == KVQuantConfig(method)


def test_every_flag_reaches_the_config():
    argv = "--kv-quant oscar --kv-quant-rotations r --kv-quant-sink 128 --kv-quant-recent 512 --kv-quant-group-size 64"
    argv += " --kv-quant-prefill-window 1024 --kv-quant-clip-k 0.9 --kv-quant-clip-v 0.8 --kv-quant-bf16-budget 0.2"
    config = flags.parse_config(vars(_parser().parse_args(argv.split())))
    assert config == KVQuantConfig("oscar", "r", 128, 512, 64, 0.9, 0.8, 0.2, prefill_window=1024)


def test_bits_and_seed_reach_the_config():
    argv = ["--kv-quant", "turboquant", "--kv-quant-bits", "2.5", "--kv-quant-seed", "7"]
    assert flags.parse_config(vars(_parser().parse_args(argv))) == KVQuantConfig("turboquant", bits="2.5", seed=7)
    argv = ["--kv-quant", "oscar-lloyd-max", "--kv-quant-bits", "auto:2.75"]
    assert flags.parse_config(vars(_parser().parse_args(argv))).width.target == 2.75


@pytest.mark.parametrize("bits", [2.375, "2.375"], ids=repr)
def test_transform_takes_any_number_of_bits(bits):
    config = flags.parse_config({"kv_quant": "transform", "kv_quant_bits": bits})
    assert config.width.bits == 2.375 and config.width.target is None
    assert "transform: 2.5 or any number from 1.25 to 4" in " ".join(_parser().format_help().split())


@pytest.mark.parametrize("bits", [4, 4.0, "4"], ids=repr)
def test_bits_from_a_yaml_file_or_engine_may_be_numbers(bits):
    config = flags.parse_config({"kv_quant": "turboquant", "kv_quant_bits": bits})
    assert config.width.bits == 4 and isinstance(config.bits, str)


def test_width_of_another_method_ends_the_command(command_line):
    with pytest.raises(SystemExit, match="--kv-quant-bits 5: not a width of --kv-quant oscar. Choose 2, 2.5, 3"):
        command_line("--kv-quant", "oscar", "--kv-quant-bits", "5")


def test_no_kv_quant_is_no_config():
    assert flags.parse_config(vars(_parser().parse_args([]))) is None


@pytest.mark.parametrize("words", ["--kv-quant-sink 128", "--kv-quant-sink 64", "--kv-quant none --kv-quant-seed 0"])
def test_flag_without_kv_quant_is_refused(words):
    with pytest.raises(KVQuantError, match="--kv-quant-(sink|seed) has no effect without --kv-quant"):
        flags.parse_config(vars(_parser().parse_args(words.split())))


@pytest.mark.parametrize("flag", ["--kv-quant-sink", "--kv-quant-recent"])
def test_window_that_is_no_multiple_of_the_page_ends_the_command(command_line, flag):
    with pytest.raises(SystemExit, match=f"{flag} 100: must be a multiple of the page size 64"):
        command_line("--kv-quant", "int2", flag, "100")


def test_unknown_method_ends_the_command(command_line, capsys):
    with pytest.raises(SystemExit):
        command_line("--kv-quant", "int1")
    assert "int1" in capsys.readouterr().err


def test_server_args_without_kv_quant_are_untouched(command_line):
    server_args = command_line()
    assert config_of(server_args) is None
    assert compat.resolved(server_args, "page_size") != 64


def _resolve(server_args):
    if hasattr(server_args, "resolve_once"):  # 0.5.16 has already resolved them
        server_args.resolve_once()
    return server_args


def test_implied_settings_survive_sglangs_own_resolution(command_line):
    server_args = _resolve(command_line("--kv-quant", "hadamard"))
    assert config_of(server_args) == KVQuantConfig("hadamard")
    assert compat.resolved(server_args, "page_size") == 64
    assert compat.resolved(server_args, "attention_backend") == "torch_native"
    assert compat.resolved(server_args, "kv_cache_dtype") == "bfloat16"
    prefill = compat.resolved(server_args, "cuda_graph_config").prefill.backend
    assert getattr(prefill, "value", prefill) == "disabled"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prefill_graphs_are_those_between_which_attention_runs(device):
    """Since SGLang 0.5.22, on a GPU, only breakable prefill graphs are allowed; SGLang's own choice stays."""
    served = device == "cuda" and compat.applies(NEW_TREE, compat.sglang_version())
    for named in (None, "disabled", "breakable", "full", "tc_piecewise"):
        values = {"kv_quant": "hadamard", "cuda_graph_backend_prefill": named, "disable_prefill_cuda_graph": False}
        if named in (None, "disabled") or (served and named == "breakable"):
            checks.check_flags(values, device)
            flags.complete(values, KVQuantConfig("hadamard"), device)
            assert values["disable_prefill_cuda_graph"] is not served
            assert values["cuda_graph_backend_prefill"] == (named if served else None)
        else:
            with pytest.raises(KVQuantError, match=f"--cuda-graph-backend-prefill {named}: .* Leave the flag out"):
                checks.check_flags(values, device)
    values = {"kv_quant": "hadamard"}
    flags.complete(values, KVQuantConfig("hadamard", capture="/tmp:1:0"), device)
    assert values["disable_prefill_cuda_graph"]  # a calibration would count made-up batches of captures


class _Model:
    """The part of SGLang's ModelConfig that counts layers."""

    num_hidden_layers = 4

    def __init__(self, *kinds: str) -> None:
        self.hf_config = SimpleNamespace(num_hidden_layers=4, layer_types=list(kinds) or None)


def test_decode_graphs_hold_what_a_quantized_cache_runs(monkeypatch):
    """On a large GPU the largest captured batch rises, unless the user sets it or buffers grow with the batch."""
    monkeypatch.setattr(compat, "gpu_memory", lambda: 81559.0)

    def largest(model=None, device="cuda", **given):
        values = {"kv_quant": "int2", "cuda_graph_max_bs_decode": None, "max_running_requests": None, **given}
        flags.complete(values, KVQuantConfig("int2"), device, model)
        return values["cuda_graph_max_bs_decode"]

    full = _Model()
    assert largest(full) == 1024
    assert largest(full, max_running_requests=300) == 300 and largest(full, max_running_requests=5000) == 1024
    assert largest(full, cuda_graph_max_bs_decode=64) == 64
    assert largest(full, moe_a2a_backend="none") == 1024
    for given in (
        {"cuda_graph_bs_decode": [1, 2]},
        {"speculative_algorithm": "NGRAM"},
        {"enable_dp_attention": True},
        {"moe_a2a_backend": "deepep"},
        {"device": "cpu"},
    ):
        assert largest(full, **given) is None, given
    assert largest(None) is None  # the model has not been read yet
    assert largest(_Model(*["full_attention", "sliding_attention"] * 2)) is None
    assert largest(_Model(*["full_attention"] * 4)) == 1024
    for memory in (24564.0, 46068.0, None):
        monkeypatch.setattr(compat, "gpu_memory", lambda: memory)  # noqa: B023
        assert largest(full) is None


def test_gpu_memory_is_what_sglang_counts(monkeypatch):
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "get_device_memory_capacity", lambda device: {"cuda": 81559.0}[device])
    assert compat.gpu_memory() == 81559.0

    def without(device):
        raise RuntimeError("nvidia-smi not found.")

    monkeypatch.setattr(common, "get_device_memory_capacity", without)
    assert compat.gpu_memory() is None


@pytest.mark.parametrize("gib", [16, 24, 34, 36, 48, 59, 61, 80, 140, 159, 179])
def test_chunks_by_the_gpus_memory_are_sglangs(command_line, monkeypatch, gib):
    module = "arg_groups.memory_hook" if compat.applies(NEW_TREE, compat.sglang_version()) else "server_args"
    monkeypatch.setattr(f"sglang.srt.{module}.get_device_memory_capacity", lambda device: gib << 10)
    assert compat.resolved(_resolve(command_line()), "chunked_prefill_size") == default_chunk(gib << 10)


def test_scrapes_and_probes_are_not_logged_unless_other_paths_are_named(command_line):
    flag, name = "--uvicorn-access-log-exclude-prefixes", "uvicorn_access_log_exclude_prefixes"
    quiet = compat.resolved(command_line("--kv-quant", "int2"), name)
    assert any("/metrics".startswith(p) for p in quiet) and any("/health_generate".startswith(p) for p in quiet)
    assert not any("/v1/chat/completions".startswith(p) for p in quiet)
    assert compat.resolved(command_line("--kv-quant", "int2", flag, "/metrics"), name) == ["/metrics"]


def test_attention_backend_follows_the_device():
    assert compat.attention_backend("cpu") == "torch_native"
    assert compat.attention_backend("cuda") == "triton"


def test_config_reaches_other_processes(command_line):
    server_args = command_line("--kv-quant", "hadamard", "--kv-quant-recent", "128")
    for sent in (server_args, _resolve(server_args)):
        assert config_of(pickle.loads(pickle.dumps(sent))) == KVQuantConfig("hadamard", recent_tokens=128)


def test_yaml_file_is_merged_and_the_command_line_wins(command_line, tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("kv-quant: hadamard\nkv-quant-sink: 128\nkv-quant-recent: 512\nkv-quant-clip-k: 0.9\n")
    config = config_of(command_line("--config", str(path), "--kv-quant-recent", "128"))
    assert config == KVQuantConfig("hadamard", sink_tokens=128, recent_tokens=128, clip_k=0.9)


def test_default_in_a_yaml_file_without_kv_quant_is_refused(command_line, tmp_path):
    (tmp_path / "server.yaml").write_text("kv-quant-recent: 256\n")
    with pytest.raises(SystemExit, match="--kv-quant-recent has no effect without --kv-quant"):
        command_line("--config", str(tmp_path / "server.yaml"))


def test_yaml_file_can_say_none(command_line, tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("kv-quant: none\n")
    assert config_of(command_line("--config", str(path))) is None
