"""Keys and limits: who may ask, how much, and what those over it are told (OR-12)."""

import asyncio
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.admission.rate_limits import WINDOW_S, Rate
from orchestrator.api.http.responses import spell_duration
from orchestrator.settings import InvalidSettings, load_settings
from tests.orchestrator.conftest import MakeService, bearer
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan

ASK = {"model": "fake", "prompt": "hello", "max_tokens": 5}
KEYS = {
    "alice": {"token": "alice-token", "requests_per_min": 2},
    "bob": {"token": "bob-token"},
    "front": {"token": "front-token", "names_tenants": True},
}


@settings(max_examples=100, deadline=None)
@given(
    per_min=st.integers(1, 50),
    asks=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 12), st.integers(0, 12)), max_size=60),
)
@example(  # the sums of which lack 7e-15 s
    per_min=11,
    asks=[
        (1.6999999999999993, 1, 0),
        (1.5420838742235894, 1, 0),
        (1.1968335838090072, 1, 0),
        (27.607975341216623, 6, 1),
        (0.0, 6, 0),
    ],
)
def test_or12_no_stretch_of_time_sees_more_than_its_rate(
    per_min: int, asks: list[tuple[float, int, int]]
) -> None:
    """OR-12: in every window of w seconds at most limit · (1 + w/60), what is given back aside;
    and a client that waits as long as told gets in."""
    rate, now = Rate(per_min), 0.0
    taken: list[tuple[float, int]] = []
    for pause_s, count, back in asks:
        now += pause_s
        wait_s = rate.wait_s(count, now)
        assert (wait_s == math.inf) == (count > per_min)
        assert (wait_s == 0) == (count <= rate.remaining(now))
        if 0 < wait_s < math.inf:
            now += wait_s + 1e-6
            assert rate.wait_s(count, now) == 0
        if count <= per_min:
            rate.take(count, now)
            back = min(back, count)
            rate.give_back(back)
            taken.append((now, count - back))
        assert 0 <= rate.remaining(now) <= per_min
    for start in range(len(taken)):
        for end in range(start, len(taken)):
            stretch_s = taken[end][0] - taken[start][0]
            used = sum(count for _, count in taken[start : end + 1])
            assert used <= per_min * (1 + stretch_s / WINDOW_S) + 1e-6


@for_each(
    ("seconds", "spelled"),
    [(0, "0ms"), (0.1204, "121ms"), (1.5, "1.5s"), (60, "1m0s"), (366.25, "6m6.25s")],
)
def test_or12_reset_times_are_spelled_as_openai_spells_them(seconds: float, spelled: str) -> None:
    assert spell_duration(seconds) == spelled


async def test_or12_a_key_has_limits_of_its_own(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """OR-12, OR-4: 429 with when to come again; others, and health, do not notice."""
    service = await make_service(worker, keys=KEYS)
    left = []
    for _ in range(2):
        async with service.http.post(
            "/v1/completions", json=ASK, headers=bearer("alice-token")
        ) as response:
            assert response.status == 200
            left.append(response.headers["x-ratelimit-remaining-requests"])
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-reset-requests"].endswith("s")
    assert left == ["1", "0"]
    for path in ("/v1/completions", "/v2/tasks"):
        async with service.http.post(path, json=ASK, headers=bearer("alice-token")) as response:
            assert response.status == 429
            error = (await response.json())["error"]
            assert error["code"] == "rate_limited" and "2 requests a minute" in error["message"]
            assert 0 < int(response.headers["retry-after-ms"]) <= 30_000
            assert 1 <= int(response.headers["Retry-After"]) <= 30
            assert response.headers["x-should-retry"] == "true"
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
    async with service.http.post(
        "/v1/completions", json=ASK, headers={"x-api-key": "bob-token"}
    ) as response:
        assert response.status == 200
        told = {n: v for n, v in response.headers.items() if n.startswith("x-ratelimit")}
        assert told == {  # the queue's bound, which counts for everybody
            "x-ratelimit-limit-requests": "100",
            "x-ratelimit-remaining-requests": "100",
        }
    for _ in range(5):
        await service.ask("GET", "/health/ready")
    assert sorted(service.outcomes()) == ["met", "met", "met", "refused", "refused"]


async def test_or12_tokens_are_taken_ahead_and_given_back(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """OR-12: prompt and max_tokens count while it runs, what was generated afterwards."""
    plan = worker.does(Plan(stall_at=1, tokens=3))
    service = await make_service(worker, limits__all_keys__tokens_per_min=100)
    ask = ASK | {"max_tokens": 60}  # and 5 of the prompt

    async def post(body: dict[str, object]) -> tuple[int, str, str]:
        async with service.http.post("/v1/completions", json=body) as response:
            code = "" if response.ok else (await response.json())["error"]["code"]
            retry = response.headers.get("x-should-retry", "")
            return response.status, code, retry

    first = asyncio.create_task(post(ask))
    await worker.until(lambda: worker.running == 1)
    assert await post(ask) == (429, "rate_limited", "true")
    assert await post(ASK | {"max_tokens": 96}) == (429, "rate_limited", "false")
    plan.release.set()
    assert (await first)[0] == 200
    await service.ask("POST", "/v1/completions", json=ask)
    async with service.http.post("/v2/tasks", json=ASK) as response:
        assert response.headers["x-ratelimit-limit-tokens"] == "100"
        assert 60 <= int(response.headers["x-ratelimit-remaining-tokens"]) <= 90


async def test_or12_concurrent_requests_are_bounded_until_they_end(
    worker: FakeWorker, make_service: MakeService
) -> None:
    plan = worker.does(Plan(stall_at=1))
    service = await make_service(worker, limits__each_key__concurrent=2, keys=KEYS)
    for expected in (202, 202, 429):
        await service.ask("POST", "/v2/tasks", expected, json=ASK, headers=bearer("bob-token"))
    await service.ask("POST", "/v2/tasks", 202, json=ASK, headers=bearer("front-token"))
    plan.release.set()
    await service.until(lambda: service.outcomes().count("met") == 3)
    await service.ask("POST", "/v2/tasks", 202, json=ASK, headers=bearer("bob-token"))
    await service.until(lambda: service.outcomes().count("met") == 4)


async def test_or12_keys_are_named_and_only_some_name_tenants(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """OR-12: a key's requests are its own tenant's, unless it may speak for others."""
    service = await make_service(worker, token="shared", admin_token="root", keys=KEYS)
    other = ASK | {"tenant": "acme"}
    for token, body, status in (
        ("alice-token", ASK, 202),
        ("alice-token", ASK | {"tenant": "alice"}, 202),
        ("bob-token", other, 403),
        ("front-token", other, 202),
        ("shared", other, 202),
        ("nobody", ASK, 401),
        ("", ASK, 401),
        ("alice-tokeN", ASK, 401),
    ):
        await service.ask("POST", "/v2/tasks", status, json=body, headers=bearer(token))
    for token, status in (("alice-token", 403), ("shared", 403), ("root", 404)):
        await service.ask("POST", "/v2/instances/x/drain", status, headers=bearer(token))


async def test_or12_a_task_is_known_to_its_own_key_only(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """Its text is its tenant's; an admin may look, and stop it. Nobody else knows of it."""
    admin = {"token": "admin-token", "is_admin": True}
    service = await make_service(worker, keys=KEYS | {"ops": admin})
    body, alice = {"prompt": "hello", "max_tokens": 5}, bearer("alice-token")
    task = await service.ask("POST", "/v2/tasks", 202, json=body, headers=alice)
    url = f"/v2/tasks/{task['task_id']}"
    for call, path in (("GET", url), ("GET", f"{url}/events"), ("DELETE", url)):
        await service.ask(call, path, 404, headers=bearer("bob-token"))
        await service.ask(call, path, 200, 202, headers=bearer("admin-token"))
    await service.ask("GET", url, headers=bearer("alice-token"))


async def test_or12_without_an_admin_key_nobody_is_admin(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, token="shared")
    error = await service.refused(403, "/v2/instances/x/drain", headers=bearer("shared"))
    assert "TIDEGATE_ADMIN_TOKEN" in error["message"]


@for_each(
    ("keys", "complaint"),
    [
        ({"a": {}}, "exactly one of token"),
        ({"a": {"token": "x", "token_sha256": "0" * 64}}, "exactly one of token"),
        ({"a b": {"token": "x"}}, "name"),
        ({"a": {"token": "x"}, "b": {"token": "x"}}, "same token"),
        ({"a": {"token": "x", "rate": 3}}, "a.rate: not a setting"),
    ],
)
def test_or12_keys_that_do_not_fit_are_refused(keys: object, complaint: str) -> None:
    with pytest.raises(InvalidSettings, match=complaint) as raised:
        load_settings(keys=keys)
    assert "TIDEGATE_KEYS" in str(raised.value)


def test_or12_a_key_alone_opens_the_door_off_loopback() -> None:
    """OR-12: a token given as its digest never stands in a file."""
    keys = {"a": {"token_sha256": "0" * 64}}
    assert load_settings(host="0.0.0.0", keys=keys).keys["a"].digest_hex == "0" * 64


async def test_or12_what_only_counts_tokens_counts_as_a_request(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """OR-12: it takes the tokenizer's threads as a prompt does."""
    service = await make_service(worker, keys=KEYS)
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
    headers = bearer("alice-token")
    statuses = []
    for _ in range(3):
        async with service.http.post(
            "/v1/messages/count_tokens", json=body, headers=headers
        ) as response:
            statuses.append(response.status)
    assert statuses == [200, 200, 429]
    await service.ask("POST", "/v1/completions", 429, json=ASK, headers=headers)
