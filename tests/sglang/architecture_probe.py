"""Runs the plugin's checks on a config of each architecture that the installed SGLang lists.

``python -m tests.sglang.architecture_probe`` prints the results as a JSON object. It runs in its own process, because a
model can be built only after SGLang has set that process up. Models are built on torch's meta device, so a published
model's size costs no memory.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import logging
import os
import socket
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from tests.leaving import leave
from tests.sglang.architecture_examples import REFUSED, Config, example, model_types


@cache
def entry_classes() -> dict[str, str]:
    """Returns the source file of each class that a module of ``sglang.srt.models`` lists in its ``EntryClass``."""
    spec = find_spec("sglang")
    assert spec and spec.submodule_search_locations
    found = {}
    for path in sorted((Path(spec.submodule_search_locations[0]) / "srt" / "models").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8-sig")).body:
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == "EntryClass" for target in node.targets):
                listed = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
                found |= {ast.unparse(name): path.name for name in listed}
    return found


@dataclass
class Said:
    """Results of the checks for one config; None where nothing was refused.

    Attributes:
        unread: why SGLang cannot read the config.
        config: the refusal by ``check_model``, without the table of architectures.
        table: the refusal by that table alone.
        unbuilt: why the model could not be built here.
        layers: the refusal of the built model's layers.
    """

    unread: str | None = None
    config: str | None = None
    table: str | None = None
    unbuilt: str | None = None
    layers: str | None = None

    @property
    def is_plain(self) -> bool:
        """True if nothing was refused: the model was built, and the cache serves all its layers."""
        return (self.unread, self.config, self.table, self.unbuilt, self.layers) == (None,) * 5


def start() -> None:
    """Sets this process up as one worker of a CPU server, as far as models need it."""
    import torch
    from sglang.srt.server_args import prepare_server_args

    from sglang_kvq.sglang import compat
    from tests.sglang.conftest import LLAMA

    folder = write(LLAMA)
    server_args = prepare_server_args(["--model-path", folder, "--device", "cpu"])
    from sglang.srt.configs.model_config import ModelConfig

    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if hasattr(server_args, "resolve_once"):  # in the releases of releases.NEW_TREE
        from sglang.srt.runtime_context import SpawnRanks, publish

        server_args.resolve_once()
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        from sglang.srt.distributed import bootstrap

        bootstrap.init_parallel_runtime(server_args=server_args, device="cpu", dist_port=port)
        bootstrap.init_layer_runtime(model_config=ModelConfig(folder))
    else:
        from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(server_args)
        init_distributed_environment(
            backend="gloo",
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
        )
        initialize_model_parallel(tensor_model_parallel_size=1)
        initialize_dp_attention(server_args, ModelConfig(folder))
    assert compat.is_supported(compat.sglang_version())
    for name in (  # Qwen 3.5's module looks these up when it is imported
        "sigmoid_mul",
        "qk_gemma_rmsnorm",
        "qk_gemma_rmsnorm_with_gate",
        "qkvzba_split_reshape_cat_contiguous",
    ):
        setattr(torch.ops.sgl_kernel, f"fused_{name}_cpu", None)
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()  # imports all models, before the default device is meta
    from sglang.srt.models.llava import LlavaForConditionalGeneration

    LlavaForConditionalGeneration._config_cls_name_to_arch_name_mapping = names_of_models


def names_of_models(self, auto) -> dict[str, str | tuple[str, ...]]:
    """Returns transformers' model classes by config, both by name; Llava's method imports all of them for this."""
    lazy = auto._model_mapping
    return {lazy._config_mapping[kind]: found for kind, found in lazy._model_mapping.items()}


#: Architectures whose published configs name a ``sliding_window``, or whose configs might name one.
WINDOWED = (
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Ministral3ForCausalLM",
    "Phi3ForCausalLM",
    "PhiMoEForCausalLM",
    "Starcoder2ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "InternLM3ForCausalLM",
    "IQuestCoderForCausalLM",
    "MiMoForCausalLM",
    "MiniMaxM2ForCausalLM",
    "LlamaForCausalLM",
)


def with_window(config: Config) -> Config:
    """Returns the config of a checkpoint that gives all its layers a sliding window."""
    return {**config, "sliding_window": 64}


def write(config: Config) -> str:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def ask(config: Config) -> Said:
    """Runs the checks on one config, in order, and stops when a step fails."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _initialize_model

    from sglang_kvq.config import KVQuantConfig
    from sglang_kvq.errors import KVQuantError
    from sglang_kvq.rotations.identity import cached_layers, geometry_of
    from sglang_kvq.sglang import architectures, checks
    from sglang_kvq.sglang.attention import layers

    said, kv_quant = Said(), KVQuantConfig("hadamard")
    try:
        model = ModelConfig(write(config), dtype="bfloat16")
    except Exception as error:
        return Said(unread=f"{type(error).__name__}: {error}")
    try:
        with (
            mock.patch.object(architectures, "refusal_of", return_value=None),
            mock.patch.object(checks, "_check_release"),
        ):  # the table covers all releases
            checks.check_model(model, kv_quant)
    except KVQuantError as error:
        said.config = str(error)
    said.table = architectures.refusal_of(model.hf_config.architectures)
    if said.config:
        return said
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            built = _initialize_model(model, LoadConfig())
    except BaseException as error:
        said.unbuilt = f"{type(error).__name__}: {error}"
        return said
    finally:
        torch.set_default_dtype(torch.float32)
    try:
        geometry = geometry_of(model.hf_config)
        windows = model.swa_attention_layer_ids if model.is_hybrid_swa else ()
        layers.check_layers(built, geometry.head_dim, model.get_num_kv_heads(1), windows)
        layers.check_layer_ids(built, cached_layers(model.hf_config), windows)
    except SystemExit as error:
        said.layers = str(error)
    heads = {x.tp_k_head_num for x in built.modules() if isinstance(x, layers.RadixAttention)}
    if said.layers is None and heads != {model.get_num_kv_heads(1)}:
        said.layers = f"layers of {heads} KV heads, and the cache has {model.get_num_kv_heads(1)}"
    return said


def main() -> None:
    gc.disable()  # collections would visit the million objects of SGLang's modules again and again
    logging.disable(logging.CRITICAL)
    shown = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        start()
        types, only = model_types(), sys.argv[1:]
        windowed = {
            name: asdict(ask(with_window(example(name, types)))) for name in WINDOWED if name in entry_classes()
        }
        found = {name: asdict(ask(example(name, types))) for name in entry_classes() if not only or name in only}
        refused = {
            name: asdict(ask({"torch_dtype": "bfloat16", **config, "architectures": [name]}))
            for name, config in REFUSED.items()
            if name in found
        }
    json.dump({"examples": found, "refused": refused, "windowed": windowed}, shown)
    shown.flush()


if __name__ == "__main__":
    main()
    leave()
