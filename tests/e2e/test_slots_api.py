"""``/v2/slots`` in front of the real Triton: the model that ``test_slot`` asks plainly."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import aiohttp
import pytest

from tests.e2e.test_slot import RECIPE
from tests.support.processes import eventually
from tests.support.sse import events_of
from tests.support.stack import Orchestrator, Triton, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHORT = RECIPE | {"text": "Hi.", "video": {"fps": 6, "size": 64}}


@pytest.fixture(scope="module")
def front(slots: Triton) -> Iterator[Orchestrator]:
    most = {"clips.dispatch.admission.MOST_WAITING": 200}
    orchestrator = Orchestrator(slots.grpc, slots__serve=True, **most)
    with running(orchestrator):
        yield orchestrator


def test_an_instance_that_is_there_for_clips_lacks_no_text_model(front: Orchestrator) -> None:
    """Nor does it fail again and again, which would wake somebody up."""
    eventually(
        lambda: front.metric("tidegate_instance_state", state="clips") == 1,
        "the instance to be known as one without a text model",
    )
    assert front.metric("tidegate_instance_health_failures_total") == 0


async def test_a_hundred_at_once_each_come_to_one_outcome(front: Orchestrator) -> None:
    """And who is met can fetch the clip."""
    before = front.metric("tidegate_slots_offered_total")

    async def one(http: aiohttp.ClientSession, number: int) -> str:
        body = {"recipe": SHORT, "deadline_ms": 20_000 + 400 * number}
        async with http.post("/v2/slots", json=body) as response:
            slot = await response.json()
        if response.status != 202:
            return str(slot["error"]["code"])
        last = (await events_of(http, slot["events_url"]))[-1].json()
        if last["outcome"] == "met":
            async with http.get(last["outputs"]["mp4"]) as response:
                assert (await response.read())[4:8] == b"ftyp"
        return str(last["outcome"])

    async with aiohttp.ClientSession(front.url) as http:
        outcomes = Counter(await asyncio.gather(*(one(http, number) for number in range(100))))
    possible = {"met", "partial", "missed", "refused", "deadline_infeasible"}
    assert set(outcomes) <= possible, outcomes
    assert outcomes["met"] >= 10
    assert front.metric("tidegate_slots_offered_total") - before == 100
    settled = front.metric("tidegate_slot_outcomes_total")
    assert settled == front.metric("tidegate_slots_offered_total")
