"""The hook table against the installed SGLang, and the behavior if SGLang differs from the table."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
from packaging.version import Version

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.releases import NEW_TREE, OLD_TREE, RELEASES
from sglang_kvq.sglang import compat, hooks
from sglang_kvq.sglang.hooks import PATCHED_KINDS, Hook, Kind, Process
from sglang_kvq.sglang.runtime import CONFIG_ATTRIBUTE

RELEASE = compat.sglang_version()
CONFIG = KVQuantConfig("hadamard")
FROM_CLI = next(h for h in hooks.TABLE if h.target == "server_args.ServerArgs.from_cli_args")
POOL = next(h for h in hooks.TABLE if h.target.endswith("._build_mha_kv_pool"))


@pytest.mark.parametrize("hook", hooks.for_release(RELEASE), ids=lambda h: f"{h.kind.value}-{h.target}")
def test_symbol_is_as_expected(hook):
    assert hooks.problem(hook) is None


@pytest.mark.parametrize("hook", [h for h in hooks.TABLE if h.handler], ids=lambda h: h.target)
def test_handler_exists(hook):
    module, _, name = hook.handler.partition(":")
    assert callable(getattr(import_module(f"sglang_kvq.sglang.{module}"), name))


def test_patched_entries_have_handlers_and_others_have_none():
    for hook in hooks.TABLE:
        assert (hook.handler is not None) == (hook.kind in PATCHED_KINDS), hook.target


def test_no_symbol_is_listed_twice_for_one_release():
    for release in RELEASES:
        targets = [h.target for h in hooks.for_release(Version(release))]
        assert len(targets) == len(set(targets))


def test_missing_symbol_is_named():
    text = hooks.problem(replace(POOL, target=POOL.target + "_gone"))
    assert "KVCacheConfigurator._build_mha_kv_pool_gone" in text and "not found" in text


def test_missing_module_is_named():
    assert "mem_cache.nowhere.Thing" in hooks.problem(
        Hook(Kind.READ, Process.SCHEDULER, "mem_cache.nowhere.Thing", "x")
    )


def test_missing_backend_is_named():
    backend = Hook(Kind.BACKEND, Process.SCHEDULER, "layers.attention.attention_registry.ATTENTION_BACKENDS.gone", "x")
    assert "ATTENTION_BACKENDS.gone" in hooks.problem(backend)


@pytest.mark.parametrize(
    "params", [("arguments",), ("args", "more"), ()], ids=["renamed", "removed", "new required parameter"]
)
def test_changed_signature_shows_both(params):
    text = hooks.problem(replace(FROM_CLI, params=params))
    assert "from_cli_args" in text and f"expected ({', '.join(params)})" in text and "are (args)" in text


def test_new_optional_parameter_is_accepted(monkeypatch):
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(ServerArgs, "check_server_args", lambda self, strict=False, **more: None)
    entry = next(h for h in hooks.TABLE if h.target.endswith("check_server_args"))
    assert hooks.problem(entry) is None


@pytest.mark.parametrize(
    ("release", "supported"),
    [
        ("0.5.15", False),
        ("0.5.16", True),
        ("0.5.18.post1", True),
        ("0.5.19", False),
        ("0.5.21", False),
        ("0.5.22", True),
        ("0.5.23", True),
        ("0.6.0", True),
        ("0.5.24.dev3+gabc", True),
    ],
)
def test_supported_releases(release, supported):
    assert compat.is_supported(Version(release)) is supported


def test_releases_of_entries_are_named_once():
    """Each change of SGLang has one pair of version ranges, and each release is in exactly one of the two."""
    pairs = (
        (OLD_TREE, NEW_TREE),
        (hooks.PER_TOKEN_FREES, hooks.RELEASES_PAGES),
        (hooks.SETS_ARGUMENTS, hooks.SETS_CONTEXT),
        (hooks.NO_TRANSFERS, hooks.TRANSFERS),
    )
    assert {h.versions for h in hooks.TABLE} <= {"", *(word for pair in pairs for word in pair)}
    for release in RELEASES:
        for pair in pairs:
            assert sum(compat.applies(versions, Version(release)) for versions in pair) == 1


def test_every_patched_entry_is_in_place(applied):
    expected = {h for h in hooks.for_release(RELEASE) if h.kind in PATCHED_KINDS}
    assert set(applied._installed) == expected
    assert applied.not_applied() == []


def test_hook_overwritten_by_someone_else_is_named(applied, monkeypatch):
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(ServerArgs, "from_cli_args", classmethod(lambda cls, args: None))
    assert len(applied.not_applied()) == 1
    with pytest.raises(SystemExit, match=r"ServerArgs\.from_cli_args .*the hook is not in place"):
        applied.stop_unless_in_place(CONFIG)


def test_hook_wrapped_by_another_plugin_counts_as_in_place(applied, monkeypatch):
    import functools

    from sglang.srt.server_args import ServerArgs

    ours = ServerArgs.check_server_args

    @functools.wraps(ours)
    def theirs(self):
        return ours(self)

    monkeypatch.setattr(ServerArgs, "check_server_args", theirs)
    assert applied.not_applied() == []


def test_scheduler_side_hooks_call_the_original_without_kv_quant(applied):
    calls = []
    handler = applied._installed[POOL]
    assert handler(lambda *a, **k: calls.append((a, k)) or "stock", "self", quant_method=None) == "stock"
    assert calls == [(("self",), {"quant_method": None})]


@pytest.fixture
def fresh(applied, monkeypatch):
    """The plugin as in a process where nothing is registered yet; registrations are recorded, not applied."""
    from sglang.srt import plugins
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(plugins, "load_plugins", lambda: None)  # it would install every hook a second time
    monkeypatch.setattr(Engine, "server_args_class", staticmethod(dict))  # not the plugin's, and restored in the end
    registered = []
    monkeypatch.setattr(applied, "_installed", {})
    monkeypatch.setattr(applied, "_problems", [])
    monkeypatch.setattr(applied, "_config", None)
    monkeypatch.setattr(applied, "_install_backend", lambda hook: registered.append(hook.path))
    monkeypatch.setattr(HookRegistry, "register", lambda path, *rest: registered.append(path))
    return SimpleNamespace(plugin=applied, registered=registered)


def _doctor(monkeypatch, hook, **changes):
    """Replaces the hook table by one with a single entry changed."""
    table = [replace(h, **changes) if h is hook else h for h in hooks.TABLE]
    select = hooks.for_release
    monkeypatch.setattr(hooks, "for_release", lambda version, process=None: select(version, process, table))


def test_mismatch_patches_only_what_reports_it(fresh, monkeypatch, caplog):
    _doctor(monkeypatch, POOL, params=("other",))
    with caplog.at_level("WARNING", logger="sglang_kvq"):
        fresh.plugin.register()
    assert "_build_mha_kv_pool" in caplog.text and "unavailable" in caplog.text
    assert "sglang.srt.managers.scheduler.Scheduler.__init__" in fresh.registered
    assert not any("RadixCache" in path or "KVCacheConfigurator._build" in path for path in fresh.registered)


def test_many_mismatches_are_one_short_warning(fresh, monkeypatch, caplog):
    monkeypatch.setattr(hooks, "problems", lambda table: [f"symbol {n}" for n in range(26)])
    with caplog.at_level("WARNING", logger="sglang_kvq"):
        fresh.plugin.register()
    assert caplog.messages == ["--kv-quant is unavailable: symbol 0; a server with --kv-quant lists 25 more"]
    with pytest.raises(SystemExit, match="- symbol 0\\n(.*\\n)+  - symbol 25"):
        fresh.plugin.stop_unless_in_place(CONFIG)


def test_mismatch_stops_a_scheduler_with_kv_quant_only(fresh, monkeypatch):
    _doctor(monkeypatch, POOL, target="mem_cache.kv_cache_configurator.KVCacheConfigurator._build_gone")
    fresh.plugin.register()
    fresh.plugin.before_scheduler_init(None, SimpleNamespace(), None)  # nothing happens without --kv-quant
    with pytest.raises(SystemExit, match="_build_gone"):
        fresh.plugin.before_scheduler_init(None, SimpleNamespace(**{CONFIG_ATTRIBUTE: CONFIG}), None)


def test_unsupported_release_is_explained(fresh, monkeypatch):
    monkeypatch.setattr(compat, "sglang_version", lambda: Version("0.5.12"))
    fresh.plugin.register()
    with pytest.raises(SystemExit, match=r"SGLang 0\.5\.12 is not supported. Supported are >=0\.5\.16"):
        fresh.plugin.stop_unless_in_place(CONFIG)


def test_unsupported_release_is_explained_before_anything_else_is_read(fresh, monkeypatch):
    """Checks of flags and models would fail with a traceback at a symbol that such a release does not have."""
    from sglang.srt.entrypoints.engine import Engine

    from sglang_kvq.sglang import flags

    monkeypatch.setattr(compat, "sglang_version", lambda: Version("0.5.20"))
    monkeypatch.delattr("sglang.srt.utils.common.get_device")
    fresh.plugin.register()
    given = {"model_path": "m", "kv_quant": "hadamard"}
    for start in (
        Engine.server_args_class,
        lambda **values: flags.from_cli_args(None, None, SimpleNamespace(**values)),
    ):
        with pytest.raises(SystemExit, match=r"SGLang 0\.5\.20 is not supported"):
            start(**given)
    assert Engine.server_args_class(model_path="m") == {"model_path": "m"}


def test_scheduler_does_not_start_unless_the_plugin_was_loaded(fresh):
    with pytest.raises(SystemExit, match="did not load the sglang-kvq plugin"):
        fresh.plugin.run_scheduler(lambda *a: pytest.fail("started"), "server_args")


def test_scheduler_starts_when_the_plugin_was_loaded(applied):
    assert applied.run_scheduler(lambda *a, **k: (a, k), "server_args", 1, dp_rank=0) == (
        ("server_args", 1),
        {"dp_rank": 0},
    )


def test_handlers_of_a_scheduler_run_once_its_server_args_ask_for_kv_quant(applied, monkeypatch):
    monkeypatch.setattr(applied, "_config", None)
    applied.before_scheduler_init(None, SimpleNamespace(**{CONFIG_ATTRIBUTE: CONFIG}), None)
    assert applied._config == CONFIG
    applied.before_scheduler_init(None, SimpleNamespace(), None)
    assert applied._config is None
