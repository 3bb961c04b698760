"""What is sent again, when, and how often it runs: before a scripted server, and a real one."""

from datetime import timedelta

import pytest
from aiohttp import web

import tidegate
from tests.client.conftest import FakeTime
from tests.orchestrator.conftest import Service
from tests.support.cutting_proxy import losing_answers
from tests.support.fake_orchestrator import FakeOrchestrator, end
from tests.support.fake_worker import FakeWorker
from tidegate import Client, Retries, deadline

BUSY = {"error": {"code": "queue_full", "message": "full"}}


class Grudging(FakeOrchestrator):
    """Refuses the first submissions, each in its way."""

    def __init__(self, *refusals: tuple[int, dict[str, str]]) -> None:
        super().__init__([end(1, 0)])
        self.refusals = list(refusals)

    async def _submit(self, request: web.Request) -> web.Response:
        if self.refusals:
            self.headers.append(dict(request.headers))
            await request.read()
            status, headers = self.refusals.pop(0)
            return web.json_response(BUSY, status=status, headers=headers)
        return await super()._submit(request)


async def test_the_servers_pause_is_kept_and_its_word_counts(fake_time: FakeTime) -> None:
    fake = Grudging(
        (429, {"retry-after-ms": "250"}), (500, {"x-should-retry": "true", "Retry-After": "2"})
    )
    async with fake.serve(), Client(fake.base_url) as client:
        await client.generate("hi")
        assert fake_time.pauses == [0.25, 2]
        fake.refusals = [(429, {"x-should-retry": "false", "retry-after-ms": "1"})]
        with pytest.raises(tidegate.Unavailable):
            await client.submit("hi")
    assert len(fake_time.pauses) == 2
    keys = [headers["Idempotency-Key"] for headers in fake.headers]
    assert len(keys) == 4 and len(set(keys[:3])) == 1 and keys[3] != keys[0]


async def test_pauses_without_a_hint_grow_and_end(fake_time: FakeTime) -> None:
    fake = Grudging(*[(503, {})] * 9)
    policy = Retries(attempts=5, first_s=1, most_s=4)
    async with fake.serve(), Client(fake.base_url, retries=policy) as client:
        with pytest.raises(tidegate.Unavailable):
            await client.submit("hi")
    assert len(fake.headers) == 6
    for pause, whole in zip(fake_time.pauses, (1, 2, 4, 4, 4), strict=True):
        assert whole / 2 <= pause <= whole


async def test_a_retry_states_the_time_that_is_left_in_the_same_body(fake_time: FakeTime) -> None:
    """Another body would be refused under the same key."""
    fake = Grudging((429, {"retry-after-ms": "1500"}))
    async with fake.serve(), Client(fake.base_url) as client:
        await client.submit("hi", deadline=timedelta(seconds=4))
    assert [headers["X-Timeout-Ms"] for headers in fake.headers] == ["4000", "2500"]
    assert fake.submitted[0]["deadline_ms"] == 4000


@pytest.mark.parametrize("hint_ms", [2000, 5000])
async def test_a_retry_that_cannot_finish_is_not_begun(fake_time: FakeTime, hint_ms: int) -> None:
    fake = Grudging((429, {"retry-after-ms": str(hint_ms)}))
    async with fake.serve(), Client(fake.base_url) as client:
        with deadline(2), pytest.raises(tidegate.Unavailable):
            await client.submit("hi")
    assert (len(fake.headers), fake_time.pauses) == (1, [])


async def test_a_lost_answer_does_not_run_the_task_twice(
    service: Service, worker: FakeWorker, fake_time: FakeTime
) -> None:
    """The real orchestrator took the task on, and the network lost its 202, twice."""
    async with losing_answers(service.url, b"202", times=2) as url, Client(url) as client:
        answer = await client.generate("hi", max_tokens=3)
    assert len(answer.token_ids) == 3
    assert len(worker.submits) == 1
    assert len(fake_time.pauses) == 2
