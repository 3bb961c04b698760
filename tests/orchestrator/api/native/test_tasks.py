"""``/v2/tasks``: submit, follow, resume, replay, cancel."""

import asyncio
from typing import Any

import pytest

from orchestrator.tasks.job import PlacementConstraint, PlacementMode
from orchestrator.tasks.task import Task
from protocol import OnDeadline, Outcome
from tests.orchestrator.api.asking import CHAT
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.sse import read_events

ASK = {"prompt": "hello", "max_tokens": 5}


async def submit(service: Service, **changes: object) -> Any:
    return await service.ask("POST", "/v2/tasks", 202, json=ASK | changes)


async def status_of(service: Service, task_id: str) -> Any:
    return await service.ask("GET", f"/v2/tasks/{task_id}")


async def test_or1_the_order_of_events(service: Service) -> None:
    """OR-1, DL-9: queued started token* end; numbered; the budget in the terminal event."""
    task = await submit(service)
    assert task["status"] == "dispatched"
    assert (task["queue_position"], task["predicted_start_ms"]) == (0, 0.0)
    async with service.http.get(task["events_url"]) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "Content-Encoding" not in response.headers
        events = [event async for event in read_events(response)]
    assert [e.event for e in events] == ["queued", "started", *["token"] * 5, "end"]
    assert [e.id for e in events] == [str(i) for i in range(8)]
    tokens = [e.json() for e in events if e.event == "token"]
    assert tokens == [{"text": f"w{i} ", "token_ids": [i], "index": i} for i in range(5)]
    end = events[-1].json()
    assert (end["outcome"], end["finish_reason"]) == ("met", "length")
    assert end["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert set(end["budget"]) == {"queue_ms", "route_ms", "prefill_ms", "decode_ms", "left_ms"}
    status = await status_of(service, task["task_id"])
    assert (status["status"], status["outcome"]) == ("ended", "met")
    assert status["text"] == "w0 w1 w2 w3 w4 "


async def test_or2_resume_without_duplicates_and_replay(
    service: Service, worker: FakeWorker
) -> None:
    """OR-2: from every event on, live and after the end, the same events once each."""
    plan = worker.does(Plan(stall_at=3))
    task = await submit(service)
    url = task["events_url"]
    live = [asyncio.create_task(service.follow(url, after)) for after in ("", "1", "4", "6")]
    await service.until(lambda: len(_followers(service, task["task_id"])) == 4)
    plan.release.set()
    whole, *rest = await asyncio.gather(*live)
    assert len(whole) == 8
    for after, events in zip((1, 4, 6), rest, strict=True):
        assert events == whole[after + 1 :]
    for after in range(7):
        assert await service.follow(url, str(after)) == whole[after + 1 :]
    await service.ask("GET", url, 204, headers={"Last-Event-ID": "7"})


def _followers(service: Service, task_id: object) -> list[object]:
    task = service.orchestrator.store.get(str(task_id))
    return [listener for listener in task.listeners if listener is not task.transcript]


async def test_text_held_back_to_the_end_comes_as_a_token_event_without_ids(
    service: Service, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(tail="…")
    task = await submit(service, max_tokens=2)
    url = task["events_url"]
    events = await service.follow(url)
    assert [e.id for e in events] == ["0", "1", "2", "3", "4", "5"]
    assert events[4].json() == {"text": "…", "token_ids": [], "index": 2}
    assert (await status_of(service, task["task_id"]))["text"] == "w0 w1 …"
    assert await service.follow(url, "4") == events[5:]


async def test_logprobs(service: Service) -> None:
    task = await submit(service, max_tokens=1, logprobs=1)
    events = await service.follow(task["events_url"])
    token = events[2].json()
    assert token["logprob"] == -0.5
    assert token["top_logprobs"] == [{"token_id": 0, "logprob": -0.5}]


async def test_every_field_reaches_the_worker(service: Service, worker: FakeWorker) -> None:
    headers = {"X-Correlation-Id": "abc-1"}
    stated: dict[str, Any] = {
        "max_tokens": 4,
        "min_tokens": 2,
        "ignore_eos": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 11,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    body = CHAT | stated | {"deadline_ms": 5000, "on_deadline": "partial"}
    body |= {"stop": ["a", "b"], "logit_bias": {"7": -100, "3": 2.5}}
    async with service.http.post("/v2/tasks", json=body, headers=headers) as response:
        assert response.headers["X-Correlation-Id"] == "abc-1"
        task = await response.json()
    await service.follow(task["events_url"])
    submit = worker.submits[0]
    assert submit.correlation_id == "abc-1"
    assert submit.token_ids[0] == 0 and submit.token_ids[-1] == 4
    assert 0 < submit.budget_ms <= 5000
    assert submit.deadline_unix_ms is not None
    assert submit.on_deadline is OnDeadline.PARTIAL
    sampling = submit.sampling
    assert {name: getattr(sampling, name) for name in stated} == stated
    assert (sampling.stop, sampling.logprobs) == (("a", "b"), None)
    assert sampling.logit_bias == ((7, -100.0), (3, 2.5))


@for_each("path", ["/v2/tasks", "/v1/completions"])
async def test_or2_when_and_where_reach_the_job(service: Service, path: str) -> None:
    """OR-2: priority, tenant, session and placement, in our API and in OpenAI's body."""
    offered: list[Task] = []
    begin = service.orchestrator.stages.admission.begin

    def keep(task: Task) -> None:
        offered.append(task)
        begin(task)

    service.orchestrator.stages.admission.begin = keep  # type: ignore[method-assign]
    wishes = {
        "priority": "batch",
        "tenant": "acme",
        "session_id": "s-1",
        "placement": {"mode": "prefer", "instances": ["a:1"]},
        "on_deadline": "fit",
    }
    for body in (ASK | {"model": "fake"}, ASK | {"model": "fake"} | wishes):
        await service.ask("POST", path, 200, 201, 202, json=body)
    plain, wished = (task.job for task in offered)
    assert (plain.priority, plain.tenant, plain.session_id) == ("interactive", "default", "")
    assert plain.placement == PlacementConstraint()
    assert (wished.priority, wished.tenant, wished.session_id) == ("batch", "acme", "s-1")
    assert wished.placement == PlacementConstraint(PlacementMode.PREFER, ("a:1",))
    assert wished.on_deadline is OnDeadline.FIT


@pytest.mark.parametrize(
    ("stated", "keys", "salts"),
    [
        ({}, ["one", "two"], ["one", "two"]),
        ({"isolate_tenants": False}, ["one", "two"], ["", ""]),
        ({"isolate_tenants": True}, ["one"], ["one", "one"]),
    ],
)
async def test_or24_keys_share_no_prefixes_once_there_are_several(
    worker: FakeWorker,
    make_service: MakeService,
    stated: dict[str, bool],
    keys: list[str],
    salts: list[str],
) -> None:
    settings = {name: {"token": f"sk-{name}"} for name in keys}
    service = await make_service(worker, keys=settings, **stated)
    for name in (keys[0], keys[-1]):
        headers = {"x-api-key": f"sk-{name}"}
        await service.ask("POST", "/v2/tasks", 202, json=ASK, headers=headers)
    await worker.until(lambda: len(worker.submits) == 2)
    assert [submit.cache_salt for submit in worker.submits] == salts


async def test_wk9_how_long_a_session_is_kept_reaches_the_worker(
    worker: FakeWorker, service: Service
) -> None:
    """In the body or by header, in every dialect; half a minute where it is not stated."""
    for path, body, headers in (
        ("/v2/tasks", ASK, {}),
        ("/v2/tasks", ASK | {"session_id": "s"}, {}),
        ("/v2/tasks", ASK | {"session_id": "s", "idle_keep_s": 0}, {}),
        ("/v1/chat/completions", CHAT | {"idle_keep_s": 60}, {"X-Session-Id": "s"}),
        ("/v1/messages", CHAT, {"X-Session-Id": "s"}),
    ):
        await service.ask("POST", path, 200, 201, 202, json=body, headers=headers)
        await worker.until(lambda: not worker.running)
    kept = [(submit.session, submit.session_keep_ms) for submit in worker.submits]
    named = "default/s"
    assert kept == [("", 0), (named, 30_000), (named, 0), (named, 60_000), (named, 30_000)]


async def test_wp2_cancel_is_idempotent_and_final(service: Service, worker: FakeWorker) -> None:
    """WP-2: 202 every time, nothing after the acknowledgement but the terminal event."""
    worker.plan = lambda submit: Plan(stall_at=2)
    task = await submit(service)
    url = f"/v2/tasks/{task['task_id']}"
    async with service.http.get(f"{url}/events") as response:
        events = []
        async for event in read_events(response):
            events.append(event.event)
            if events.count("token") == 2 and event.event == "token":
                for call, path in (
                    (service.http.post, f"{url}/cancel"),
                    (service.http.delete, url),
                    (service.http.post, f"{url}/cancel"),
                ):
                    async with call(path) as answer:
                        assert answer.status == 202
    assert events == ["queued", "started", "token", "token", "error"]
    assert event.json()["code"] == "cancelled"
    status = await status_of(service, task["task_id"])
    assert (status["status"], status["outcome"]) == ("ended", "aborted")
    await worker.until(lambda: not worker.running)
    freed = "tidegate_abort_to_freed_ms_count"
    await service.until(lambda: service.metric(freed, cause="cancel") == 1)
    assert len(worker.cancels) == 1
    assert service.outcomes() == ["aborted"]


async def test_tokens_after_a_cancel_are_late_and_wasted(
    service: Service, worker: FakeWorker
) -> None:
    """DL-10: a worker that does not stop at once; what it still makes is counted apart."""
    plan = worker.does(Plan(stall_at=2, ignores_cancel=True))
    task = await submit(service, max_tokens=6)
    await service.until(
        lambda: service.orchestrator.store.get(task["task_id"]).completion_tokens == 2
    )
    await service.ask("DELETE", f"/v2/tasks/{task['task_id']}", 202)
    lane = next(iter(service.orchestrator.registry)).lanes[0]
    assert lane.load == 1, "the slot is not free before the worker says so"
    plan.release.set()
    await service.until(lambda: lane.load == 0)
    assert service.metric("tidegate_tokens_late_total") == 4
    assert service.metric("tidegate_tokens_wasted_total") == 6
    assert (await status_of(service, task["task_id"]))["text"] == "w0 w1 "


async def test_wp1_a_task_outlives_its_reader_or_not(service: Service, worker: FakeWorker) -> None:
    """WP-1: ``continue`` is the default here; with ``cancel`` the last reader takes it along."""
    plans = [Plan(stall_at=1), Plan(stall_at=1)]
    worker.plan = lambda submit: plans[len(worker.submits) - 1]
    tasks = [await submit(service), await submit(service, on_disconnect="cancel")]
    for task in tasks:
        async with service.http.get(task["events_url"]) as response:
            async for event in read_events(response):
                if event.event == "token":
                    break
            response.close()
    await service.until(lambda: service.outcomes() == ["aborted"])
    plans[0].release.set()
    await service.until(lambda: service.outcomes() == ["aborted", "met"])
    status = await status_of(service, tasks[0]["task_id"])
    assert (status["outcome"], status["text"]) == ("met", "w0 w1 w2 w3 w4 ")


async def test_or24_a_key_that_fills_the_queue_takes_no_place_from_another(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """OR-13: and readiness says no only once nobody would be let in."""
    worker = await make_worker(max_running=1)
    release = worker.does(Plan(stall_at=0))
    keys = {"loud": {"token": "loud-token"}, "calm": {"token": "calm-token"}}
    service = await make_service(worker, MOST_BACKLOG=0, queue__max_waiting=4, keys=keys)

    async def post(key: str, **changes: object) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {key}-token"}
        async with service.http.post("/v2/tasks", json=ASK | changes, headers=headers) as response:
            if response.status == 429:
                assert int(response.headers["retry-after-ms"]) > 0
            return response.status, await response.json()

    async def readiness() -> tuple[int, str]:
        service.parts.health.refresh()
        status, told = await service.answer("GET", "/health/ready")
        return status, told["status"]

    flood = [await post("loud", priority="batch") for _ in range(8)]
    assert [status for status, _ in flood] == [202] * 5 + [429] * 3
    assert await readiness() == (200, "near_exhaustion")
    assert [(await post("calm"))[0] for _ in range(3)] == [202, 202, 429]
    store = service.orchestrator.store
    ended = [store.get(task["task_id"]).ending for status, task in flood if status == 202]
    assert [ending and ending.outcome for ending in ended].count(Outcome.REFUSED) == 2
    assert await readiness() == (200, "near_exhaustion"), (
        "batch work still gives way to its own key"
    )
    assert [(await post("loud"))[0] for _ in range(3)] == [202, 202, 429]
    assert await readiness() == (200, "near_exhaustion"), "to a third key"
    release.release.set()
    await service.until(lambda: service.outcomes().count("met") == 5)


async def test_waiting_tasks_know_their_place(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """OR-4: with one slot taken the rest wait, in order; beyond the bound there is a 429."""
    worker = await make_worker(max_running=1)
    release = worker.does(Plan(stall_at=0))
    service = await make_service(worker, MOST_BACKLOG=0, queue__max_waiting=2)
    tasks = [await submit(service) for _ in range(3)]
    assert [task["queue_position"] for task in tasks] == [0, 0, 1]
    assert tasks[2]["predicted_start_ms"] > tasks[1]["predicted_start_ms"] > 0
    async with service.http.post("/v2/tasks", json=ASK) as response:
        assert response.status == 429
        assert int(response.headers["retry-after-ms"]) > 0
        assert int(response.headers["Retry-After"]) >= 1
        assert response.headers["x-should-retry"] == "true"
        assert (await response.json())["error"]["code"] == "queue_full"
    await service.ask("GET", "/health/ready")
    service.parts.health.refresh()
    assert (await service.ask("GET", "/health/ready", 503))["status"] == "exhausted"
    await service.ask("DELETE", f"/v2/tasks/{tasks[1]['task_id']}", 202)
    assert (await status_of(service, tasks[2]["task_id"]))["queue_position"] == 0
    release.release.set()
    for task, last in zip(tasks, ("end", "error", "end"), strict=True):
        assert (await service.follow(task["events_url"]))[-1].event == last
    assert len(worker.submits) == 2, "what was cancelled in the queue never left"
    assert sorted(service.outcomes()) == ["aborted", "met", "met", "refused"]


async def test_a_long_replay_is_not_a_slow_client(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """What is replayed may be larger than a client's buffer: it is read at the client's pace."""
    worker.plan = lambda submit: Plan(tokens=600, per_delta=60, text=lambda i: "x" * 1000)
    service = await make_service(worker, CLIENT_BUFFER_BYTES=4096)
    task = await submit(service)
    await service.until(lambda: service.outcomes() == ["met"])
    events = await service.follow(task["events_url"])
    assert [int(e.id) for e in events] == list(range(603))
