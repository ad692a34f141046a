"""``/v1/sessions``: routes that list, describe and delete a tenant's sessions.

They are registered before SGLang sets up its middleware, so that API keys protect them like any other route.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.session import Session
from sglang_kvq.sglang import checks
from sglang_kvq.sglang.router.requests import tenant_of
from sglang_kvq.sglang.router.router import router_of
from sglang_kvq.sglang.router.turns import TokenizerManager
from sglang_kvq.sglang.runtime import config_of
from sglang_kvq.sglang.types import ServerArgs


def before_http_server(
    server_args: ServerArgs,
    tokenizer_manager: TokenizerManager,
    template_manager: Any,
    port_args: Any,
    scheduler_infos: Sequence[dict[str, Any]],
    *args: Any,
    **kwargs: Any,
) -> None:
    """BEFORE ``http_server._setup_and_run_http_server``: registers the routes."""
    config = config_of(server_args)
    if config is None or config.episodic is None:
        return
    from sglang.srt.entrypoints.http_server import app

    sizes, workers = scheduler_infos[0]["kv_quant"], checks.attention_workers(server_args)
    costs = (sizes["token_bytes"] * workers, sizes["bf16_token_bytes"] * workers)
    app.include_router(routes(tokenizer_manager, config, costs))


def routes(manager: TokenizerManager, config: KVQuantConfig, token_bytes: tuple[float, float]) -> Any:
    """Builds the routes, a ``fastapi.APIRouter``.

    Args:
        token_bytes: bytes of a token, quantized and in BF16, on all workers together.
    """
    from fastapi import APIRouter
    from fastapi.responses import JSONResponse
    from starlette.requests import Request

    router = router_of(manager)
    if router is None:
        raise RuntimeError("kv-quant: /v1/sessions without --episodic-policy. Please report this.")
    store, api = router.store, APIRouter()

    def answer(session: Session) -> dict[str, Any]:
        return describe(session, config, token_bytes)

    def error(error: KVQuantError, kind: str, code: int) -> JSONResponse:
        return JSONResponse({"object": "error", "message": str(error), "type": kind, "code": code}, code)

    def of_tenant(request: Any, found: Callable[[str], Any]) -> Any:
        """Returns ``found(tenant)`` for the request's tenant, or an error response with the reason."""
        try:
            tenant = tenant_of(request, router.episodic.tenant_header)
        except KVQuantError as problem:
            return error(problem, "BadRequest", 400)
        try:
            return found(tenant)
        except KVQuantError as problem:
            return error(problem, "NotFound", 404)
        finally:
            router.show_state()  # a session may have been deleted, or found to be idle

    # Annotations in this module are strings, and FastAPI cannot resolve the local name Request. So they are set below.
    async def every(request: Any) -> Any:
        return of_tenant(
            request, lambda tenant: {"object": "list", "data": [answer(session) for session in store.of(tenant)]}
        )

    async def one(session_id: str, request: Any) -> Any:
        return of_tenant(request, lambda tenant: answer(store.get(tenant, session_id)))

    async def delete(session_id: str, request: Any) -> Any:
        def forget(tenant: str) -> dict[str, Any]:
            store.delete(tenant, session_id)
            return {"id": session_id, "object": "session.deleted", "deleted": True}

        return of_tenant(request, forget)

    for endpoint in (every, one, delete):
        endpoint.__annotations__["request"] = Request
    api.get("/v1/sessions")(every)
    api.get("/v1/sessions/{session_id:path}")(one)
    api.delete("/v1/sessions/{session_id:path}")(delete)
    return api


def describe(session: Session, config: KVQuantConfig, token_bytes: tuple[float, float]) -> dict[str, Any]:
    """Returns a session in plain values, for JSON.

    ``hot_bytes`` counts the bytes that the last request read when its answer began. ``total_bytes`` adds the computed
    history, which SGLang may have evicted since. ``state_bytes`` is the memory of all branches in the process that
    serves HTTP. ``history_tokens``, ``computed_tokens``, ``embedded_pages`` and ``episodes`` describe the branch that
    was used last.
    """
    (quantized, bf16), branch = token_bytes, session.latest
    window = min(session.hot, config.slots_per_request * PAGE_SIZE)
    hot_bytes = session.hot * quantized + window * bf16
    return {
        "id": session.id,
        "object": "session",
        "created": int(session.created),
        "last_used": int(session.used),
        "history_tokens": len(branch.tokens),
        "computed_tokens": branch.exact,
        "hot_tokens": session.hot,
        "hot_bytes": round(hot_bytes),
        "total_bytes": round(branch.exact * quantized + hot_bytes),
        "embedded_pages": len(branch.index),
        "branches": len(session.branches),
        "state_bytes": session.nbytes,
        "read": {"of_tokens": session.history, "pages": list(session.pages)},
        "episodes": {"count": len(branch.episodes.clusters or ()), "read": branch.episodes.answered},
        "matches": [asdict(match) for match in session.matches],
        "requests": session.requests,
        "requests_with_chosen_pages": session.selected,
        "rebuilt": session.rebuilt,
    }
