"""``/v2/sessions``: what was said is kept, for its own key, and continues where there is room."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from orchestrator.sessions import store
from orchestrator.sessions.extension import SessionRoom
from protocol import Submit
from tests.orchestrator.api.asking import CHAT
from tests.orchestrator.conftest import MakeService, Service, bearer
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan, tokenizer_json
from tests.support.rooms import room

_TOKENIZER = Tokenizer.from_str(tokenizer_json().decode())


def text_of(submit: Submit) -> str:
    """The prompt as a worker got it."""
    return str(_TOKENIZER.decode(list(submit.token_ids), skip_special_tokens=False))


async def call(
    service: Service, method: str, path: str, status: int, token: str = "", **body: object
) -> Any:
    payload = body if method == "POST" else None
    answer = await service.ask(method, path, status, json=payload, headers=bearer(token))
    return answer.get("error", answer)


async def create(service: Service, token: str = "", **body: object) -> str:
    answer = await call(service, "POST", "/v2/sessions", 201, token, **body)
    return str(answer["session_id"])


async def say(
    service: Service, session_id: str, text: str = "hi", status: int = 202, **body: object
) -> Any:
    message = {"messages": [{"role": "user", "content": text}]}
    if "prompt" in body or "prompt_token_ids" in body:
        message = {}
    asked = {"max_tokens": 2, "session_id": session_id} | message | body
    return await call(service, "POST", "/v2/tasks", status, **asked)


async def turn(service: Service, session_id: str, text: str = "hi", **body: object) -> None:
    """Say something and wait for the answer."""
    turns = (await call(service, "GET", f"/v2/sessions/{session_id}", 200))["turns"]
    await say(service, session_id, text, **body)
    session = room(service.orchestrator, SessionRoom).store.get(session_id, None)
    await service.until(lambda: session.turns > turns)


async def test_a_chat_goes_on_with_what_was_said(service: Service, worker: FakeWorker) -> None:
    session_id = await create(service, messages=[{"role": "system", "content": "be kind"}])
    await turn(service, session_id, "one")
    await turn(service, session_id, "two")
    said = "<|bos|><|system|>be kind<|end|><|user|>one<|end|><|assistant|>"
    first, second = map(text_of, worker.submits)
    assert first == said
    assert second == f"{said}w0 w1 <|end|><|user|>two<|end|><|assistant|>"
    shown = await call(service, "GET", f"/v2/sessions/{session_id}", 200)
    assert [one["role"] for one in shown["messages"]] == ["system", *["user", "assistant"] * 2]
    assert (shown["turns"], shown["kind"], shown["status"]) == (2, "messages", "idle")
    assert {submit.session for submit in worker.submits} == {f"default/{session_id}"}


async def test_a_text_and_token_ids_go_on_too(service: Service, worker: FakeWorker) -> None:
    session_id = await create(service)
    await turn(service, session_id, prompt="one ")
    await turn(service, session_id, prompt="two ")
    assert text_of(worker.submits[-1]) == "one w0 w1 two "
    ids = await create(service, prompt_token_ids=[7, 8])
    await turn(service, ids, prompt_token_ids=[9])
    await turn(service, ids, prompt_token_ids=[10])
    assert list(worker.submits[-1].token_ids) == [7, 8, 9, 0, 1, 10]
    error = await say(service, ids, status=400)
    assert "began with prompt_token_ids" in error["message"]
    assert error["field"] == "messages"


async def test_a_turn_that_did_not_end_well_leaves_no_trace(
    service: Service, worker: FakeWorker
) -> None:
    session_id = await create(service)
    await turn(service, session_id, "one")
    plans = [Plan(fail_at=1), Plan(stall_at=1), Plan()]
    worker.plan = lambda submit: plans[len(worker.submits) - 2]
    await say(service, session_id, "fails")
    await service.until(lambda: "failed" in service.outcomes())
    task = await say(service, session_id, "is cancelled")
    await call(service, "DELETE", f"/v2/tasks/{task['task_id']}", 202)
    await say(service, session_id, "is refused", status=400, max_tokens=10**6)
    await turn(service, session_id, "two")
    said = text_of(worker.submits[-1])
    assert said.count("<|user|>") == 2 and "fails" not in said
    dropped = service.metric("tidegate_session_turns_total", what="dropped")
    assert dropped == 2


async def test_one_turn_at_a_time(service: Service, worker: FakeWorker) -> None:
    plan = worker.does(Plan(stall_at=1))
    session_id = await create(service)
    task = await say(service, session_id)
    error = await say(service, session_id, status=409)
    assert (error["code"], error["retryable"]) == ("session_busy", False)
    assert task["task_id"] in error["message"]
    shown = await call(service, "GET", f"/v2/sessions/{session_id}", 200)
    assert (shown["status"], shown["task_id"]) == ("running", task["task_id"])
    plan.release.set()
    await service.until(lambda: service.outcomes() == ["met"])
    await turn(service, session_id)


async def test_deleting_ends_what_runs(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(stall_at=1)
    session_id = await create(service)
    await say(service, session_id)
    await call(service, "DELETE", f"/v2/sessions/{session_id}", 200)
    await service.until(lambda: service.outcomes() == ["aborted"])
    await call(service, "DELETE", f"/v2/sessions/{session_id}", 404)
    await say(service, session_id, status=404)
    assert service.metric("tidegate_kept_bytes", holder="sessions") == 0
    assert service.metric("tidegate_sessions_ended_total", why="deleted") == 1


KEYS = {"a": {"token": "token-a"}, "b": {"token": "token-b"}}


async def test_another_key_sees_nothing_of_it(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, keys=KEYS, admin_token="root")
    session_id = await create(service, "token-a")
    path = f"/v2/sessions/{session_id}"
    for method in ("GET", "DELETE"):
        error = await call(service, method, path, 404, "token-b")
        assert error["code"] == "not_found"
    body = {"prompt": "x", "session_id": session_id}
    stranger = await call(service, "POST", "/v2/tasks", 404, "token-b", **body)
    nobody = await call(
        service, "POST", "/v2/tasks", 404, "token-b", prompt="x", session_id="sess_0"
    )
    assert stranger["message"].replace(session_id, "sess_0") == nobody["message"]
    assert stranger["field"] == "session_id"
    assert (await call(service, "GET", "/v2/sessions", 200, "token-b"))["sessions"] == []
    assert len((await call(service, "GET", "/v2/sessions", 200, "token-a"))["sessions"]) == 1
    await call(service, "GET", path, 200, "root")


async def test_pages(service: Service) -> None:
    ids = [await create(service) for _ in range(5)]
    seen, after = [], 0
    while True:
        page = await call(service, "GET", f"/v2/sessions?limit=2&after={after}", 200)
        seen += [one["session_id"] for one in page["sessions"]]
        if page["next_after"] is None:
            break
        after = page["next_after"]
        # One that is gone does not move the others.
        if len(seen) == 2:
            await call(service, "DELETE", f"/v2/sessions/{ids[1]}", 200)
    assert seen == ids
    for query in ("limit=0", "limit=101", "after=x", "after=-1"):
        await call(service, "GET", f"/v2/sessions?{query}", 400)


async def test_bounds(
    worker: FakeWorker, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_PER_KEY", 2)
    service = await make_service(worker, SESSION_BYTES=2000, ALL_SESSIONS_BYTES=4200)
    first = await create(service)
    error = await call(service, "POST", "/v2/sessions", 400, prompt="x" * 2000)
    assert "continue in a new session" in error["message"]
    error = await say(service, first, status=400, prompt="x" * 2000)
    assert error["field"] == "session_id"
    await turn(service, first, prompt="x" * 400)
    second = await create(service, prompt="x" * 100)
    error = await call(service, "POST", "/v2/sessions", 429)
    assert (error["code"], error["retryable"]) == ("rate_limited", False)
    error = await say(service, second, status=503, prompt="x" * 600)
    assert error["code"] == "no_capacity" and error["retryable"]
    assert len(room(service.orchestrator, SessionRoom).store) == 2
    assert len(worker.submits) == 1


async def test_or24_a_key_leaves_memory_for_the_sessions_of_others(
    worker: FakeWorker, make_service: MakeService
) -> None:
    keys = {"loud": {"token": "loud-token"}, "calm": {"token": "calm-token"}}
    service = await make_service(worker, ALL_SESSIONS_BYTES=16_000, keys=keys)

    async def create(key: str, **changes: object) -> int:
        body, own = {"prompt": "x" * 1000} | changes, bearer(f"{key}-token")
        return (await service.answer("POST", "/v2/sessions", json=body, headers=own))[0]

    loud = [await create("loud") for _ in range(20)]
    assert set(loud) == {201, 503} and loud == sorted(loud) and loud.count(201) >= 5
    assert [await create("calm") for _ in range(2)] == [201, 201]


async def test_what_is_not_used_is_forgotten(worker: FakeWorker, make_service: MakeService) -> None:
    service = await make_service(worker, SESSION_TTL_S=0.02)
    plan = worker.does(Plan(stall_at=1))
    idle, busy = await create(service), await create(service)
    await say(service, busy)
    await service.until(lambda: len(room(service.orchestrator, SessionRoom).store) == 1)
    await call(service, "GET", f"/v2/sessions/{idle}", 404)
    await call(service, "GET", f"/v2/sessions/{busy}", 200)
    plan.release.set()
    await service.until(lambda: len(room(service.orchestrator, SessionRoom).store) == 0)
    assert service.metric("tidegate_sessions_ended_total", why="expired") == 2
    assert service.metric("tidegate_kept_bytes", holder="sessions") == 0


@for_each(
    ("body", "words"),
    [
        ({"prompt": "x", "messages": []}, "at most one of"),
        ({"messages": []}, "messages is empty"),
        ({"idle_keep_s": 1e6}, "0 to 600 seconds"),
        ({"name": "x"}, "name"),
    ],
)
async def test_bad_sessions(service: Service, body: dict[str, object], words: str) -> None:
    assert words in (await call(service, "POST", "/v2/sessions", 400, **body))["message"]
    await call(service, "POST", "/v2/sessions", 404, model="unknown")


def shares(worker: FakeWorker) -> list[float | None]:
    """Of what is left of the budget, what each job's own is."""
    return [
        None if one.share_ms is None else round(one.share_ms / one.budget_ms, 3)
        for one in worker.submits
    ]


async def test_one_deadline_for_a_run_of_calls(service: Service, worker: FakeWorker) -> None:
    """By session, in the body and in headers, and across dialects by trace."""
    session_id = await create(service)
    await turn(service, session_id, deadline_ms=20_000, calls_left=3)
    for _ in range(3):
        await turn(service, session_id)
    await turn(service, session_id)
    assert shares(worker) == [0.25, 0.333, 0.5, None, None]
    budgets = [submit.budget_ms for submit in worker.submits]
    assert all(0 < budget <= 20_000 for budget in budgets[:4]) and budgets[4] > 20_000
    worker.submits.clear()
    headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-00"}
    first = {"X-Chain-Calls-Left": "1", "X-Timeout-Ms": "20000"}
    for path, more in (("/v1/chat/completions", first), ("/v1/messages", {})):
        await service.ask("POST", path, 200, 201, 202, json=CHAT, headers=headers | more)
    assert shares(worker) == [0.5, None]
    assert worker.submits[1].budget_ms <= 20_000


async def test_an_error_tells_what_is_left_of_the_run(service: Service) -> None:
    first = {"prompt": "x", "max_tokens": 1, "session_id": "run"}
    await call(service, "POST", "/v2/tasks", 202, **first, calls_left=3, deadline_ms=20_000)
    refused = {"prompt": "x", "max_tokens": 10**6, "session_id": "run"}
    async with service.http.post("/v2/tasks", json=refused) as response:
        assert response.status == 400
        left_ms = float(response.headers["X-Deadline-Budget"].rpartition("left=")[2])
        assert 0 < left_ms <= 20_000
