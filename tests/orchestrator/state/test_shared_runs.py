"""OR-18, DL-22: a run of calls has one deadline at all orchestrators that share a state."""

from tests.orchestrator.conftest import Service
from tests.orchestrator.state.conftest import Sharing, see_each_other
from tests.support.fake_worker import FakeWorker


def calls_of(service: Service) -> list[int]:
    """Calls to come of each run that an orchestrator knows."""
    by_key = service.orchestrator.runs._by_key
    return [run.calls for own in by_key.values() for run in own.values()]


async def test_a_run_has_one_deadline_at_all_members(sharing: Sharing, worker: FakeWorker) -> None:
    one, two = await sharing.member(worker), await sharing.member(worker)
    await see_each_other(one, two)
    call = {"prompt": "hi", "max_tokens": 2, "session_id": "a-trip"}
    first = call | {"calls_left": 2, "deadline_ms": 60_000}
    async with one.http.post("/v2/tasks", json=first) as response:
        assert response.status == 202
    await two.until(lambda: calls_of(two) == [2])
    async with two.http.post("/v2/tasks", json=call) as response:
        assert (response.status, response.headers["X-Deadline-Source"]) == (202, "run")
        left_ms = float(response.headers["X-Deadline-Budget"].rpartition("left=")[2])
        assert 30_000 < left_ms <= 60_000
    await one.until(lambda: calls_of(one) == calls_of(two) == [1])
