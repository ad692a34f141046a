"""The routes behind SGLang's API keys; each tenant has its own sessions and memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang.router import requests
from sglang_kvq.sglang.router import routes as session_routes
from sglang_kvq.sglang.router.metrics import SessionMetrics
from sglang_kvq.sglang.runtime import attach
from tests.sglang.router.session_model import BUDGET, CONFIG, LONG, Manager, http, request_of


def test_tenants_read_copies_of_their_own():
    manager = Manager()

    async def both():
        for key in ("Bearer one", "Bearer two"):
            await manager.turn(LONG, http(X_Session_Id="a", Authorization=key))

    asyncio.run(both())
    assert len({obj.extra_key for obj in manager.sent if obj.extra_key}) == 2
    assert len(manager.router.store) == 2 and "one" not in str(manager.router.store.of(requests.tenant_of(None)))


def test_a_key_is_one_tenant_however_its_scheme_is_spelled():
    """HTTP's authentication schemes ignore case, and so does SGLang."""
    one, other = (requests.tenant_of(http(Authorization=f"{scheme} k")) for scheme in ("Bearer", "bearer"))
    assert one == other != requests.tenant_of(http(Authorization="Bearer K"))
    assert len({requests.tenant_of(http(Authorization=key)) for key in ("k", "Bearer k", "Basic k", "")}) == 4


def test_a_tenant_that_asks_much_forgets_nobody_elses_session():
    """Many requests of one tenant displace neither another's running session nor one that waits for its next turn."""

    async def run(manager):
        await manager.turn(LONG, http(X_Session_Id="a", Authorization="alice"))
        for number in range(20):
            key = http(X_Session_Id=str(number), Authorization="mallory")
            await manager.turn(LONG[:P], key)

    manager = Manager()
    asyncio.run(run(manager))
    store = manager.router.store
    assert len(store.of(requests.tenant_of(http(Authorization="alice")))) == 1
    assert len(store.of(requests.tenant_of(http(Authorization="mallory")))) == 2


def test_states_memory_is_bounded_while_it_grows():
    manager = Manager(state_memory=1, sessions=1000)
    manager.context_len = 1 << 20

    async def run():
        for number in range(6):
            said = (np.arange(20_000, dtype=np.int32) * 7919 % 50_000 + number).tolist()
            await manager.turn(said, http(X_Session_Id=str(number)))
            assert 0 < manager.router.store.bytes <= 1 << 20

    asyncio.run(run())
    kept = manager.router.store.of("")
    assert 1 <= len(kept) < 6 and kept[0].id == "5"
    assert manager.router.store.bytes == sum(session.nbytes for session in kept)


def test_a_gateways_header_tells_tenants_apart():
    """Tenants behind a gateway share an API key; equal header values under two keys are two tenants."""
    manager = Manager(tenant_header="X-Tenant")
    keys = {"k": {"Authorization": "Bearer k"}, "other": {"Authorization": "Bearer other"}, "none": {}}
    several = [http(X_Session_Id="a", X_Tenant=name, **keys[key]) for key in keys for name in ("one", "two")]

    async def run():
        for request in several:
            await manager.turn(LONG[:P], request)

    manager.router.store.most = 9
    asyncio.run(run())
    tenants = {requests.tenant_of(request, "X-Tenant") for request in several}
    assert len(tenants) == len(manager.router.store) == 6
    assert "one" not in requests.tenant_of(http(X_Tenant="one"), "X-Tenant")


@pytest.mark.parametrize("request_", [None, http(X_Session_Id="a"), http(X_Tenant="")], ids=["grpc", "none", "empty"])
def test_a_request_without_the_gateways_header_is_refused(request_):
    manager = Manager(tenant_header="X-Tenant")
    with pytest.raises(KVQuantError, match="--episodic-tenant-header X-Tenant: this request has no such header"):
        asyncio.run(manager.heard(request_of(session_id="a"), request_))
    assert manager.sent == [] and len(manager.router.store) == 0
    asyncio.run(manager.heard(request_of(), http()))  # a request without a session goes to SGLang directly
    assert len(manager.sent) == 1


@pytest.fixture
def app():
    """Returns a client for the routes behind SGLang's middleware for API keys."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from sglang.srt.utils.auth import add_api_key_middleware

    manager, app = Manager(), FastAPI()
    app.include_router(session_routes.routes(manager, CONFIG, (10.0, 100.0)))
    add_api_key_middleware(app, api_key="secret", admin_api_key=None)
    asyncio.run(manager.turn(LONG, http(X_Session_Id="a/b", Authorization="Bearer secret")))
    return TestClient(app)


def test_routes_ask_for_the_api_key(app):
    for method, path in (("GET", ""), ("GET", "/a/b"), ("DELETE", "/a/b")):
        assert app.request(method, f"/v1/sessions{path}").status_code == 401
        wrong = app.request(method, f"/v1/sessions{path}", headers={"Authorization": "Bearer other"})
        assert wrong.status_code == 401


def test_routes_list_describe_and_forget(app):
    app.headers["Authorization"] = "Bearer secret"
    (listed,) = app.get("/v1/sessions").json()["data"]
    one = app.get("/v1/sessions/a/b").json()
    assert one == listed and one["history_tokens"] == len(LONG) + 2 and one["computed_tokens"] == 31 * P
    tail = len(LONG) - one["read"]["of_tokens"]
    assert one["hot_tokens"] == len(one["read"]["pages"]) * P + tail <= BUDGET
    window = CONFIG.slots_per_request * P
    assert one["hot_bytes"] == 10 * one["hot_tokens"] + 100 * window
    assert one["total_bytes"] == one["hot_bytes"] + 10 * 31 * P
    assert {"start", "end", "score"} == set(one["matches"][0])
    assert (one["requests"], one["requests_with_chosen_pages"], one["rebuilt"], one["branches"]) == (1, 1, 0, 1)
    assert app.delete("/v1/sessions/a/b").json() == {"id": "a/b", "object": "session.deleted", "deleted": True}
    assert app.get("/v1/sessions/a/b").status_code == app.delete("/v1/sessions/a/b").status_code == 404
    assert app.get("/v1/sessions").json()["data"] == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_servers_routes_count_the_bytes_of_all_workers(monkeypatch, workers):
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from sglang.srt.entrypoints import http_server

    app, manager = FastAPI(), Manager()
    monkeypatch.setattr(http_server, "app", app)
    manager.server_args.tp_size = workers
    infos = [{"kv_quant": {"token_bytes": 10.0, "bf16_token_bytes": 100.0}}]
    before = len(app.routes)
    for config in (None, replace(CONFIG, episodic=None)):
        server_args = SimpleNamespace()
        attach(config, server_args)
        session_routes.before_http_server(server_args, manager, None, None, infos)
    assert len(app.routes) == before
    session_routes.before_http_server(manager.server_args, manager, None, None, infos)
    manager.ask(LONG[:P])
    (one,) = TestClient(app).get("/v1/sessions").json()["data"]
    assert one["hot_bytes"] == workers * 110 * P  # the last tokens are in BF16, too


def test_gauges_follow_sessions_that_are_deleted_or_idle():
    """A server without requests also forgets idle sessions."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    manager, app = Manager(idle_seconds=0.2), FastAPI()
    app.include_router(session_routes.routes(manager, CONFIG, (10.0, 100.0)))
    counted = manager.counted()

    async def run():
        await manager.turn(LONG[:P])
        assert counted.state == (1, manager.session.nbytes)
        while counted.state != (0, 0):
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 120))
    assert manager.router.store.expired == 1
    manager.router.store.idle_seconds = 60
    manager.ask(LONG[:P])
    assert counted.state[0] == 1 and TestClient(app).delete("/v1/sessions/a").json()["deleted"]
    assert counted.state == (0, 0)


def test_idle_sessions_are_looked_for_once_at_a_time():
    manager = Manager(idle_seconds=60)

    async def run():
        await manager.turn(LONG[:P])
        before = manager.router._expiry
        manager.router.show_state()
        return before.cancelled(), manager.router._expiry.cancelled()

    assert asyncio.run(run()) == (True, False)


def test_metrics_of_a_server_that_enables_them():
    from prometheus_client import REGISTRY

    metrics = SessionMetrics()
    try:
        metrics.known(3, 1000)
        metrics.answered("whole")
        metrics.answered("chosen")
        metrics.answered("chosen")
        metrics.rebuilt()
        metrics.folded()
        metrics.computed(64)
        value = REGISTRY.get_sample_value
        assert (value("sglang_kvq_sessions"), value("sglang_kvq_session_state_bytes")) == (3, 1000)
        read = [value("sglang_kvq_session_requests_total", {"read": name}) for name in ("whole", "chosen")]
        assert read == [1, 2] and value("sglang_kvq_session_computed_tokens_total") == 64
        assert value("sglang_kvq_session_rebuilds_total") == value("sglang_kvq_episode_blocks_total") == 1
    finally:  # a name can be registered once
        for one in vars(metrics).values():
            REGISTRY.unregister(one)


def test_routes_show_each_tenant_its_own():
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    manager, app = Manager(tenant_header="X-Tenant"), FastAPI()
    app.include_router(session_routes.routes(manager, CONFIG, (10.0, 100.0)))
    client = TestClient(app)
    manager.ask(LONG[:P], http(X_Session_Id="a", X_Tenant="one"))
    one, two = {"X-Tenant": "one"}, {"X-Tenant": "two"}
    assert [found["id"] for found in client.get("/v1/sessions", headers=one).json()["data"]] == ["a"]
    assert client.get("/v1/sessions", headers=two).json()["data"] == []
    assert client.get("/v1/sessions/a", headers=one).json()["state_bytes"] > 4 * P
    for method in ("GET", "DELETE"):
        assert client.request(method, "/v1/sessions/a", headers=two).status_code == 404
        assert client.request(method, "/v1/sessions/a").status_code == 400
    refused = client.get("/v1/sessions")
    assert refused.status_code == 400 and "X-Tenant: this request has no such header" in refused.json()["message"]
    assert client.delete("/v1/sessions/a", headers=one).json()["deleted"]
