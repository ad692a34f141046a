"""Checkpoints that ask for an FP8 cache are served: SGLang leaves the cache in bfloat16, which is what we quantize."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8Config
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.sglang import checks, compat, flags
from sglang_kvq.sglang.memory.pool import build_mha_kv_pool
from sglang_kvq.sglang.runtime import CONFIG_ATTRIBUTE

SECTION = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}


def in_own_file(folder: Path) -> None:
    document = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": SECTION}
    (folder / "hf_quant_config.json").write_text(json.dumps(document))


def in_config(folder: Path) -> None:
    path = folder / "config.json"
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))


@pytest.mark.parametrize("ask", [in_own_file, in_config])
def test_the_cache_stays_in_bfloat16(applied, command_line, model_folder, ask):
    """Checks the command line and SGLang's own decision, which it makes after loading the weights."""
    folder = Path(model_folder())
    ask(folder)
    server_args = command_line("--kv-quant", "hadamard", model=str(folder))
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    checks.after_check_server_args(None, server_args)
    quant_config = ModelOptFp8Config.from_config({"quantization": SECTION})
    assert quant_config.kv_cache_quant_algo == "FP8"
    model = SimpleNamespace(quant_config=quant_config)
    given = dict(
        model=model,
        model_dtype=torch.bfloat16,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend=None,
    )
    asked = compat.resolved(server_args, "kv_cache_dtype")
    assert configure_kv_cache_dtype(server_args_kv_cache_dtype=asked, **given)[1] == torch.bfloat16
    assert configure_kv_cache_dtype(server_args_kv_cache_dtype="auto", **given)[1] == torch.float8_e4m3fn


@pytest.mark.parametrize("value", [None, "auto", "bf16", "bfloat16"])
def test_harmless_values_become_the_one_that_sglang_keeps(applied, model_folder, value):
    values = {"kv_quant": "hadamard", "model_path": model_folder(), "device": "cpu", "kv_cache_dtype": value}
    flags.prepare(values)
    assert values["kv_cache_dtype"] == "bfloat16"


def test_the_log_says_that_the_checkpoint_asked_for_another(caplog):
    with caplog.at_level("INFO", logger="sglang_kvq"):
        checks.log_checkpoint_cache(SimpleNamespace(quant_config=None))
        checks.log_checkpoint_cache(SimpleNamespace(quant_config=ModelOptFp8Config()))
        assert not caplog.records
        checks.log_checkpoint_cache(
            SimpleNamespace(quant_config=ModelOptFp8Config.from_config({"quantization": SECTION}))
        )
    assert "kv_cache_quant_algo" in caplog.text and "FP8" in caplog.text


@pytest.mark.parametrize(("model", "cache"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_other_dtypes_stop_the_scheduler(model, cache):
    """SGLang may choose float16 when it loads; a request for a bfloat16 cache must not hide that."""
    configurator = SimpleNamespace(
        server_args=SimpleNamespace(**{CONFIG_ATTRIBUTE: KVQuantConfig("int2")}),
        is_draft_worker=False,
        model_config=SimpleNamespace(dtype=getattr(torch, model)),
        kv_cache_dtype=getattr(torch, cache),
    )
    with pytest.raises(SystemExit, match="torch.float16.*--dtype bfloat16"):
        build_mha_kv_pool(None, configurator, max_total_num_tokens=64, mha_pool_class=None)
