"""What OpenAI's clients send and read beside the body they mean (OR-3)."""

import asyncio

from tests.orchestrator.conftest import MakeService
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.lazy import openai

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


async def test_dl1_the_sdks_own_timeout_is_a_deadline(
    make_service: MakeService, worker: FakeWorker
) -> None:
    """DL-1: an unmodified client has the deadline that it was made with."""
    service = await make_service(worker)
    client = await asyncio.to_thread(
        lambda: openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="x", timeout=20.0)
    )
    async with client:
        await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert 15_000 < worker.submits[-1].budget_ms <= 20_000
        await client.chat.completions.create(  # type: ignore[call-overload]
            **CHAT, extra_headers={"X-Timeout-Ms": "5000"}
        )
        assert worker.submits[-1].budget_ms <= 5000
        stream = await client.chat.completions.create(**CHAT, stream=True)  # type: ignore[call-overload]
        assert [chunk async for chunk in stream]
    assert worker.submits[-1].budget_ms > 100_000  # between two pieces, it would be


async def test_how_long_it_took_and_how_many_more_may_wait(
    make_service: MakeService, make_worker: object
) -> None:
    worker = await make_worker(max_running=1)  # type: ignore[operator]
    service = await make_service(worker, queue__max_waiting=3, MOST_BACKLOG=0)
    held = Plan(stall_at=0)
    worker.plan = lambda submit: held
    ask = [asyncio.create_task(service.http.post("/v1/chat/completions", json=CHAT))]
    await worker.until(lambda: worker.running == 1)
    ask += [asyncio.create_task(service.http.post("/v1/chat/completions", json=CHAT))]
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    body = CHAT | {"n": 0}
    async with service.http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 400
        assert response.headers["x-ratelimit-limit-requests"] == "3"
        assert response.headers["x-ratelimit-remaining-requests"] == "2"
        assert int(response.headers["openai-processing-ms"]) >= 0
    async with service.http.post("/v2/tasks", json={}) as response:
        assert not any(name.startswith("x-ratelimit") for name in response.headers)
        assert "openai-processing-ms" not in response.headers
    held.release.set()
    for answer in ask:
        async with await answer as response:
            assert response.status == 200
