"""Fixtures for a process in which SGLang is imported and the plugin is applied, as after ``load_plugins()``."""

import json
import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_kvq.releases import OLD_TREE_RELEASES, OLDEST, WITHOUT_STATES, WITHOUT_WINDOWS
from tests import hook_places

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if find_spec("sglang") is None:  # only the rest of the package is tested then
    collect_ignore_glob = ["*test_*.py"]
else:
    #: Tests of what a release refuses: HiCache with old host pools, models with recurrent states or sliding windows.
    refused = {
        OLD_TREE_RELEASES: ["hicache"],
        WITHOUT_STATES: ["memory/test_recurrent_states.py", "prefix/test_hybrid_tree.py"],
        WITHOUT_WINDOWS: ["attention/test_window_backend.py", "prefix/test_window_tree.py"],
    }
    collect_ignore = [path for releases, paths in refused.items() if version("sglang") in releases for path in paths]

#: Test files that the oldest release runs even without ``--all``. They cover calls from and to SGLang, and what its
#: generations do differently. The others test our own code, which SGLang's release cannot change, or read SGLang's
#: source for calls that nobody reviewed, which a published release does not change.
SEAMS = (
    *("allocator", "capacity", "checks", "engine", "flags", "folding", "hooks", "hybrid_pool"),
    *("hybrid_tree", "model_calls", "padding", "recurrent_states", "refusals", "rows"),
    *(
        "serve_help",
        "tree_namespaces",
        "folded_weights",
        "window_backend",
        "window_move",
        "window_sizes",
        "window_tree",
    ),
)

LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=512,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    torch_dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if items and version("sglang") == OLDEST and not config.getoption("--all"):
        here, kept = Path(__file__).parent, {f"test_{name}.py" for name in SEAMS}
        items[:] = [item for item in items if here not in item.path.parents or item.path.name in kept]


@pytest.fixture(scope="session")
def applied():
    """Returns the plugin's module, registered and with its hooks applied, once per process."""
    import sglang.srt.entrypoints.engine  # so that Engine, the scheduler and the HTTP server are patched too
    import sglang.srt.entrypoints.http_server  # noqa: F401
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_kvq.sglang import plugin

    if not plugin._installed:  # SGLang may have loaded the installed plugin already
        plugin.register()
        hook_places.install()
        HookRegistry.apply_hooks()
    assert plugin._problems == []
    return plugin


@pytest.fixture
def model_folder(tmp_path):
    """``model_folder(**changes)`` writes a folder with a tiny Llama's changed config.json and without weights."""

    def write(**changes) -> str:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        return str(folder)

    return write


@pytest.fixture
def command_line(applied, model_folder):
    """``command_line("--kv-quant", "int2")`` returns ServerArgs; the model is a tiny Llama on the CPU."""

    def parse(*argv: str, model: str | None = None):
        from sglang.srt.server_args import prepare_server_args

        model = model or model_folder()
        return prepare_server_args(["--model-path", model, "--device", "cpu", *argv])

    return parse
