"""Web pages: what a browser can be made to send does nothing here, unless it is welcome (OR-12)."""

import pytest

from orchestrator.api.http.browsers import Browsers
from orchestrator.errors import Forbidden
from orchestrator.settings import HttpSettings, InvalidSettings, load_settings
from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker
from tests.support.sse import read_events

TASK = {"prompt": "x", "max_tokens": 3}
EVIL = "https://evil.example"
UI = "https://ui.example"


OURS = (
    "localhost localhost:8080 LOCALHOST.:1 ui.localhost:3000 "
    "127.0.0.1:8080 127.8.9.1 [::1] [::1]:8080"
)
OTHERS = (
    "evil.example localhost.evil.example 127.0.0.1.evil.example evil.example:127 notlocalhost "
    "10.0.0.1 0.0.0.0:8080 [::] localhost@evil.example evil.example/localhost [::1"
)


@for_each("host", OURS.split())
def test_loopback_names_are_ours(host: str) -> None:
    Browsers(HttpSettings()).check("POST", {"Host": host, "Origin": f"http://{host}"})


@for_each("host", [*OTHERS.split(), ""])
def test_other_names_are_not(host: str) -> None:
    browsers = Browsers(HttpSettings())
    with pytest.raises(Forbidden, match="TIDEGATE_HTTP__ALLOWED_HOSTS"):
        browsers.check("GET", {"Host": host})
    for origin in (f"https://{host}", "null", "", "javascript://localhost/"):
        with pytest.raises(Forbidden, match="TIDEGATE_HTTP__CORS_ORIGINS"):
            browsers.check("POST", {"Host": "localhost", "Origin": origin})


def test_hosts_can_be_named_and_their_own_pages_come_from_them() -> None:
    browsers = Browsers(HttpSettings(allowed_hosts=("llm.example", "other.example")))
    browsers.check("POST", {"Host": "LLM.example:443", "Origin": "https://llm.example"})
    with pytest.raises(Forbidden):
        browsers.check("GET", {"Host": "evil.example"})
    browsers = Browsers(HttpSettings(allowed_hosts=("*",)))
    browsers.check("POST", {"Host": "llm.example", "Origin": "https://llm.example"})
    with pytest.raises(Forbidden):
        browsers.check("POST", {"Host": "llm.example", "Origin": EVIL})


async def test_dns_rebinding_and_strange_pages_get_nothing(
    service: Service, worker: FakeWorker
) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": EVIL}, {"Origin": "null"}):
        assert next(iter(headers)) in str(
            await service.ask("POST", "/v2/tasks", 403, json=TASK, headers=headers)
        )
    await service.ask("GET", "/v2/instances", 403, headers={"Host": "evil.example"})
    # A probe may come under any name; it learns nothing.
    await service.ask("GET", "/health/live", headers={"Host": "10.1.2.3"})
    assert worker.submits == []


async def test_a_simple_request_submits_nothing(service: Service, worker: FakeWorker) -> None:
    """A page may send these without asking; so may ``curl -d``, which is told what to add."""
    body = b'{"prompt": "x", "max_tokens": 3, "model": "fake"}'
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        for path in ("/v2/tasks", "/v1/completions"):
            async with service.http.post(
                path,
                data=body,
                headers={} if kind is None else {"Content-Type": kind},
                skip_auto_headers=("Content-Type",),
            ) as response:
                assert response.status == 415
                said = (await response.json())["error"]["message"]
            assert kind or "none" in said
            assert "-H 'Content-Type: application/json'" in said
    assert worker.submits == []
    headers = {"Content-Type": "application/json; charset=utf-8"}
    await service.ask("POST", "/v2/tasks", 202, data=body, headers=headers)


async def test_a_token_proves_more_than_host_and_origin(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """As behind a proxy or a Kubernetes service, whose names we do not know."""
    service = await make_service(worker, token="t", admin_token="a")
    headers = {"Host": "llm.corp.example", "Origin": EVIL}
    for token, status in (({"Authorization": "Bearer t"}, 202), ({}, 401)):
        await service.ask("POST", "/v2/tasks", status, json=TASK, headers=headers | token)
    path = f"/v2/instances/{worker.address}/drain"
    await service.ask("POST", path, 202, headers=headers | {"X-Api-Key": "a"})


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type,x-stainless-os",
}


async def test_cors_is_off_unless_set(service: Service) -> None:
    headers = PREFLIGHT | {"Origin": UI}
    async with service.http.options("/v2/tasks", headers=headers) as response:
        assert response.status == 405
        assert not [name for name in response.headers if name.startswith("Access-Control")]


async def test_cors_lets_named_pages_ask_and_read(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """The question before it, and answers, errors and streams alike, with and without a key."""
    service = await make_service(worker, http__cors_origins=UI, token="t")
    origin = {"Origin": UI}
    async with service.http.options("/v2/tasks", headers=origin | PREFLIGHT) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == UI
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        allowed = response.headers["Access-Control-Allow-Headers"]
        assert allowed == "authorization, content-type, x-stainless-os"
    headers = {"Origin": EVIL} | PREFLIGHT
    async with service.http.options("/v2/tasks", headers=headers) as response:
        assert response.status == 403
        assert "Access-Control-Allow-Origin" not in response.headers

    key = origin | {"Authorization": "Bearer t"}
    chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "stream": True}
    for path, body, given, status in (
        ("/v2/tasks", TASK, key, 202),
        ("/v2/tasks", TASK, origin, 401),
        ("/v2/nothing", TASK, key, 404),
        ("/v1/chat/completions", chat, key, 200),
        ("/v1/chat/completions", chat | {"deadline_ms": -1}, key, 504),
    ):
        async with service.http.post(path, json=body, headers=given) as response:
            assert response.status == status
            assert response.headers["Access-Control-Allow-Origin"] == UI
            assert response.headers["Vary"] == "Origin"
            assert "Access-Control-Allow-Credentials" not in response.headers
            exposed = response.headers["Access-Control-Expose-Headers"].lower().split(", ")
            assert "x-correlation-id" in exposed and "retry-after" in exposed
            ours = [n.lower() for n in response.headers if n.lower().startswith("x-")]
            assert set(ours) - {"x-accel-buffering"} <= set(exposed)
            if response.content_type == "text/event-stream":
                assert [event async for event in read_events(response)]
    async with service.http.get("/v1/models", headers=key | {"Origin": EVIL}) as response:
        assert response.status == 200
        assert "Access-Control-Allow-Origin" not in response.headers


@for_each(
    ("name", "value"),
    [
        ("http__cors_origins", "ui.example"),
        ("http__cors_origins", "https://ui.example/app"),
        ("http__cors_origins", "https://*.example"),
        ("http__allowed_hosts", "https://llm.example"),
        ("http__allowed_hosts", "*.example"),
    ],
)
def test_what_is_no_origin_or_host_fails_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidSettings, match=f"TIDEGATE_{name.upper()}"):
        load_settings(**{name: value})
