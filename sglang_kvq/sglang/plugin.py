"""Entry point of the ``sglang.srt.plugins`` group: verifies SGLang, then patches what ``hooks.TABLE`` lists.

SGLang logs and swallows whatever a plugin or hook raises. So with ``--kv-quant`` a hook that is not in place
raises SystemExit, which nobody swallows; without it SGLang is left alone and a mismatch is only a warning.
"""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.releases import SUPPORTED
from sglang_kvq.sglang import compat, hooks
from sglang_kvq.sglang.hooks import PATCHED_KINDS, REGISTRY_KINDS, Hook, Kind, Process
from sglang_kvq.sglang.runtime import config_of
from sglang_kvq.sglang.types import ModelRunner, Original, Scheduler, ServerArgs

logger = logging.getLogger("sglang_kvq")

#: Handler of a hooked call. Its arguments are the symbol's, after those that ``Kind`` adds.
Handler: TypeAlias = Callable[..., Any]

#: Modules of the main process that take seconds to import.
_HEAVY = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.tokenizer_control_mixin",
    "sglang.srt.managers.tokenizer_manager",
)

#: Handlers put in place, for each entry that this process patched.
_installed: dict[Hook, Handler] = {}
#: Why this process patched nothing, or less than the table says.
_problems: list[str] = []
#: Set once this process is known to serve with ``--kv-quant``; scheduler-side handlers run only then.
_config: KVQuantConfig | None = None


def register() -> None:
    """Called by SGLang in every process. Patches the main process's symbols, and where the scheduler is loaded its own.

    All of a process's symbols are verified first; if one is not as expected only what reports that is patched.
    """
    version = compat.sglang_version()
    if not compat.is_supported(version):
        _problems.append(f"SGLang {version} is not supported; supported are {' and '.join(SUPPORTED)}")
    for process in Process:
        if process is Process.SCHEDULER and "sglang.srt.managers.scheduler" not in sys.modules:
            continue  # importing the scheduler's modules here would cost the other processes seconds and memory
        table = [h for h in hooks.for_release(version, process) if _is_loaded(h)]
        if not _problems:
            _problems.extend(hooks.problems(table))
        install(h for h in table if h.kind in PATCHED_KINDS and (not _problems or _reports(h)))
    if _problems:
        logger.warning("--kv-quant is unavailable: %s", "; ".join(_problems))


def _is_loaded(hook: Hook) -> bool:
    """False for entries of a heavy module that this process has not imported: ``prepare_to_spawn`` patches them later.

    A program that calls ``Engine()`` has imported both; ``--help`` and a diffusion server do without.
    """
    heavy = next((name for name in _HEAVY if hook.path.startswith(f"{name}.")), None)
    return heavy is None or heavy in sys.modules


def _reports(hook: Hook) -> bool:
    """Entries patched in spite of problems: those that turn ``--kv-quant`` into an error message."""
    return hook.always and hook.kind in REGISTRY_KINDS and hooks.problem(hook) is None


def install(table: Iterable[Hook]) -> None:
    """Hands the entries to SGLang's HookRegistry (which applies them after this returns) or patches them here."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in table:
        if hook in _installed:
            continue
        handler = _call(hook)
        if hook.kind in REGISTRY_KINDS:
            HookRegistry.register(hook.path, handler, HookType(hook.kind.value))
        elif hook.kind is Kind.BACKEND:
            handler = _install_backend(hook)
        elif hook.kind is Kind.FACTORY:
            owner, _, name = hook.path.rpartition(".")
            handler = functools.partial(handler, hooks.find(hook))
            setattr(pkgutil.resolve_name(owner), name, staticmethod(handler))
        _installed[hook] = handler


def _call(hook: Hook) -> Handler:
    """The hook's handler, imported at its first call; inert in a process that does not serve with ``--kv-quant``."""

    @functools.cache
    def load() -> Handler:
        found: Handler = pkgutil.resolve_name(f"sglang_kvq.sglang.{hook.handler}")
        return found

    def handler(first: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.always or _config is not None:
            return load()(first, *args, **kwargs)
        # AFTER and BEFORE change nothing by returning None; ``first`` of AROUND is the original.
        return first(*args, **kwargs) if hook.kind is Kind.AROUND else None

    return handler


def _install_backend(hook: Hook) -> Handler:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    original, ours = hooks.find(hook), _call(hook)

    def create(model_runner: ModelRunner) -> Any:
        # A draft model keeps SGLang's pool, hence its attention.
        return original(model_runner) if _config is None or model_runner.is_draft_worker else ours(model_runner)

    register_attention_backend(hook.path.rpartition(".")[2])(create)
    return create


def not_applied() -> list[str]:
    """Entries that this process should have patched and did not, or that something else has overwritten since."""
    return [f"{h.path} ({h.why}): the hook is not in place" for h in _installed if not _is_applied(h)]


def hook_counts() -> dict[str, int]:
    """Returns the number of the scheduler's hooks in place in this process, and the number that the table has."""
    table = hooks.for_release(compat.sglang_version(), Process.SCHEDULER)
    wanted = [h for h in table if h.kind in PATCHED_KINDS]
    return {"applied": sum(h in _installed and _is_applied(h) for h in wanted), "expected": len(wanted)}


def _is_applied(hook: Hook) -> bool:
    """Returns True if a call of the symbol reaches our handler, through any wrappers of other plugins."""
    symbol = inspect.unwrap(hooks.find(hook), stop=lambda f: _holds(f, _installed[hook]))
    return symbol is _installed[hook] or _holds(symbol, _installed[hook])


def _holds(function: Any, handler: Handler) -> bool:
    """Returns True if a wrapper of HookRegistry calls this handler, which it keeps in its closure."""
    function = getattr(function, "__func__", function)
    return any(cell.cell_contents is handler for cell in getattr(function, "__closure__", None) or ())


def stop_unless_in_place(config: KVQuantConfig, found: Iterable[str] = ()) -> None:
    """Stops this process unless everything that ``--kv-quant`` needs here is patched.

    Raises:
        SystemExit: lists what is wrong and the fix.
    """
    wrong = [*_problems, *found] or not_applied()
    if wrong:
        raise SystemExit(
            f"--kv-quant {config.method} cannot be used with SGLang {compat.sglang_version()}:\n"
            + "\n".join(f"  - {text}" for text in wrong)
            + "\nInstall an SGLang release that sglang-kvq supports, or a newer sglang-kvq; or leave out --kv-quant."
        )


def prepare_to_spawn(config: KVQuantConfig) -> None:
    """In the main process, before any other starts: verify what schedulers will patch, patch what starts them.

    Raises:
        SystemExit: see ``stop_unless_in_place``.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    table = hooks.for_release(compat.sglang_version())
    stop_unless_in_place(config, hooks.problems(table))
    install(h for h in table if h.process is Process.MAIN and h.kind in PATCHED_KINDS)
    HookRegistry.apply_hooks()
    stop_unless_in_place(config)


def launch_schedulers(
    original: Original, cls: type, server_args: ServerArgs, port_args: Any, run: Handler, **kwargs: Any
) -> Any:
    """AROUND ``Engine._launch_scheduler_processes``: with ``--kv-quant`` they start in ``run_scheduler``."""
    if config_of(server_args) is not None:
        run = functools.partial(run_scheduler, run)
    return original(cls, server_args, port_args, run, **kwargs)


def run_scheduler(run: Handler, server_args: ServerArgs, *args: Any, **kwargs: Any) -> Any:
    """First function of a scheduler process: it must not start if SGLang did not load this plugin there.

    Raises:
        SystemExit: the hook that checks all others is missing.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()  # SGLang's own call, a moment earlier; it runs once
    if not any(h.handler == "plugin:before_scheduler_init" and _is_applied(h) for h in _installed):
        raise SystemExit("--kv-quant: SGLang did not load the sglang-kvq plugin in the scheduler process; see its log.")
    return run(server_args, *args, **kwargs)


def before_scheduler_init(scheduler: Scheduler, server_args: ServerArgs, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``Scheduler.__init__``: from here on this process serves with ``--kv-quant``, or it ends."""
    global _config  # noqa: PLW0603  (SGLang's hooks share nothing but the process)
    _config = config_of(server_args)
    if _config is None:
        return
    missing = [
        f"{h.path} ({h.why}): never registered"
        for h in hooks.for_release(compat.sglang_version())
        if h.kind in PATCHED_KINDS and h.process is Process.SCHEDULER and h not in _installed
    ]
    stop_unless_in_place(_config, () if _problems else missing)
