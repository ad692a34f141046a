"""Entry point of the ``sglang.srt.plugins`` group: verifies SGLang, then patches the symbols in ``hooks.TABLE``.

SGLang logs any exception of a plugin or hook, and continues. So with ``--kv-quant`` a missing hook raises SystemExit,
which SGLang does not catch. Without ``--kv-quant`` a mismatch is only a warning, and SGLang runs unchanged.
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

#: Handler of a hooked call. It takes the arguments that ``Kind`` adds, then those of the patched symbol.
Handler: TypeAlias = Callable[..., Any]

#: Modules of the main process that take seconds to import.
_HEAVY = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.tokenizer_control_mixin",
    "sglang.srt.managers.tokenizer_manager",
)

#: The handler of each entry that this process patched.
_installed: dict[Hook, Handler] = {}
#: Why this process patched nothing, or less than the table says.
_problems: list[str] = []
#: Set once this process is known to serve with ``--kv-quant``; scheduler-side handlers run only then.
_config: KVQuantConfig | None = None


def register() -> None:
    """Patches SGLang in this process; SGLang calls it in every process.

    It patches the main process's symbols, and the scheduler's where the scheduler is loaded. All of a process's symbols
    are verified first. If one is not as expected, only the hooks that report this are installed.
    """
    version = compat.sglang_version()
    if not compat.is_supported(version):
        _problems.append(f"SGLang {version} is not supported. Supported are {' and '.join(SUPPORTED)}")
    for process in Process:
        if process is Process.SCHEDULER and "sglang.srt.managers.scheduler" not in sys.modules:
            continue  # other processes would pay seconds and memory to import the scheduler's modules
        table = [h for h in hooks.for_release(version, process) if _is_loaded(h)]
        if not _problems:
            _problems.extend(hooks.problems(table))
        install(h for h in table if h.kind in PATCHED_KINDS and (not _problems or _reports(h)))
    if _problems:
        first, *others = _problems
        more = f"; a server with --kv-quant lists {len(others)} more" if others else ""
        logger.warning("--kv-quant is unavailable: %s%s", first, more)


def _is_loaded(hook: Hook) -> bool:
    """Returns False for a hook of a heavy module that this process has not imported.

    ``prepare_to_spawn`` patches such hooks later. ``--help`` and a diffusion server never import these modules.
    """
    heavy = next((name for name in _HEAVY if hook.path.startswith(f"{name}.")), None)
    return heavy is None or heavy in sys.modules


def _reports(hook: Hook) -> bool:
    """Returns True for a hook that is patched in spite of problems, because it answers ``--kv-quant`` with an error."""
    return hook.always and hooks.problem(hook) is None


def install(table: Iterable[Hook]) -> None:
    """Registers each entry with SGLang's HookRegistry, which applies it after this returns, or patches it here."""
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
    """Returns a function that calls the hook's handler, which is imported at the first call.

    In a process that serves without ``--kv-quant`` the function changes nothing, unless the hook is ``always`` active.
    """

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
        # A draft model keeps SGLang's pool, and therefore SGLang's attention.
        return original(model_runner) if _config is None or model_runner.is_draft_worker else ours(model_runner)

    register_attention_backend(hook.path.rpartition(".")[2])(create)
    return create


def not_applied() -> list[str]:
    """Returns a line for each hook that this process installed but that is not in place, perhaps overwritten."""
    return [f"{h.path} ({h.why}): the hook is not in place" for h in _installed if not _is_applied(h)]


def hook_counts() -> dict[str, int]:
    """Returns how many of the scheduler's hooks are in place in this process, and how many the table has."""
    table = hooks.for_release(compat.sglang_version(), Process.SCHEDULER)
    wanted = [h for h in table if h.kind in PATCHED_KINDS]
    return {"applied": sum(h in _installed and _is_applied(h) for h in wanted), "expected": len(wanted)}


def _is_applied(hook: Hook) -> bool:
    """Returns True if a call of the symbol reaches our handler, through any wrappers of other plugins."""
    symbol = inspect.unwrap(hooks.find(hook), stop=lambda f: _holds(f, _installed[hook]))
    return symbol is _installed[hook] or _holds(symbol, _installed[hook])


def _holds(function: Any, handler: Handler) -> bool:
    """Returns True if ``function`` is HookRegistry's wrapper of this handler, which its closure then holds."""
    function = getattr(function, "__func__", function)
    return any(cell.cell_contents is handler for cell in getattr(function, "__closure__", None) or ())


def stop_unless_in_place(config: KVQuantConfig, found: Iterable[str] = ()) -> None:
    """Stops this process unless all hooks that ``--kv-quant`` needs here are in place.

    Args:
        found: problems that the caller found.

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
    """Verifies the scheduler's symbols and patches the main process's, in the main process before any other starts.

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
    """AROUND ``Engine._launch_scheduler_processes``: with ``--kv-quant`` each scheduler starts in ``run_scheduler``."""
    if config_of(server_args) is not None:
        run = functools.partial(run_scheduler, run)
    return original(cls, server_args, port_args, run, **kwargs)


def run_scheduler(run: Handler, server_args: ServerArgs, *args: Any, **kwargs: Any) -> Any:
    """Starts a scheduler process, after a check that SGLang loaded this plugin in it.

    Raises:
        SystemExit: the hook that checks all others is missing.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()  # SGLang calls it a moment later anyway; only the first call has an effect
    if not any(h.handler == "plugin:before_scheduler_init" and _is_applied(h) for h in _installed):
        raise SystemExit("--kv-quant: SGLang did not load the sglang-kvq plugin in the scheduler process. See its log.")
    return run(server_args, *args, **kwargs)


def before_scheduler_init(scheduler: Scheduler, server_args: ServerArgs, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``Scheduler.__init__``: activates the scheduler's hooks, or stops the process if one is missing."""
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
