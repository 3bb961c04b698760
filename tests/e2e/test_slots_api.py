"""``/v2/slots`` in front of the real Triton: the model that ``test_slot`` asks plainly."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.e2e.test_slot import RECIPE
from tests.support.stack import Orchestrator, Triton, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG = RECIPE | {"text": "Good morning to everybody. " * 12, "video": {"fps": 30}}
SHORT = RECIPE | {"text": "Hi.", "video": {"fps": 6, "size": 64}}


@pytest.fixture(scope="module")
def front(slots: Triton) -> Iterator[Orchestrator]:
    orchestrator = Orchestrator(
        slots.grpc, slots__serve=True, **{"clips.dispatch.service.MOST_WAITING": 200}
    )
    orchestrator.start()
    try:
        yield orchestrator
    finally:
        assert orchestrator.stop() == 0


def test_an_instance_that_is_there_for_clips_lacks_no_text_model(front: Orchestrator) -> None:
    """Nor does it fail again and again, which would wake somebody up."""
    eventually(
        lambda: front.metric("tidegate_instance_state", state="clips") == 1,
        "the instance to be known as one without a text model",
    )
    assert front.metric("tidegate_instance_health_failures_total") == 0


class Client:
    """Of one test's event loop."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http

    async def submit(self, recipe: dict[str, Any], key: str = "", **more: Any) -> dict[str, Any]:
        body = {"recipe": recipe, "deadline_ms": 60_000} | more
        headers = {"Idempotency-Key": key} if key else {}
        async with self.http.post("/v2/slots", json=body, headers=headers) as response:
            answer: dict[str, Any] = await response.json()
            return answer | {"http": response.status}

    async def follow(
        self, slot: dict[str, Any], after: str = "", until: str = "", cancel: bool = False
    ) -> list[tuple[int, str, dict[str, Any]]]:
        """Events as id, name and data; to the first of the stage ``until``, or the last."""
        found = []
        headers = {"Last-Event-ID": after} if after else {}
        async with self.http.get(slot["events_url"], headers=headers) as response:
            event: dict[str, str] = {}
            async for line in response.content:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name:
                    event[name] = value
                    continue
                data = json.loads(event["data"])
                found.append((int(event["id"]), event["event"], data))
                if until and data.get("stage") == until:
                    if not cancel:
                        break
                    await self.http.delete(f"/v2/slots/{slot['slot_id']}")
        return found

    async def status(self, slot: dict[str, Any]) -> dict[str, Any]:
        async with self.http.get(f"/v2/slots/{slot['slot_id']}") as response:
            answer: dict[str, Any] = await response.json()
            return answer


def run(front: Orchestrator, test: Any) -> Any:
    async def within() -> Any:
        async with aiohttp.ClientSession(base_url=front.url) as http:
            return await test(Client(http))

    return asyncio.run(within())


def test_a_clip_over_http(front: Orchestrator) -> None:
    async def test(client: Client) -> None:
        slot = await client.submit(RECIPE, outputs=["mp4", "wav", "png"])
        assert slot["http"] == 202 and slot["predicted_ms"] > 0
        events = await client.follow(slot)
        assert [number for number, *_ in events] == list(range(len(events)))
        assert {data["stage"] for _, name, data in events if name == "stage"} == {
            *("audio", "image", "video", "clip")
        }
        _, name, result = events[-1]
        assert name == "result" and result["outcome"] == "met" and result["deadline_met"]
        assert all(result[f"{stage}_ms"] > 0 for stage in ("audio", "image", "video", "total"))
        starts = {"mp4": (4, b"ftyp"), "wav": (0, b"RIFF"), "png": (1, b"PNG")}
        for output, url in (await client.status(slot))["outputs"].items():
            at, words = starts[output]
            async with client.http.get(url) as response:
                data = await response.read()
            assert data[at : at + len(words)] == words
            range_of = {"Range": f"bytes={at}-{at + len(words) - 1}"}
            async with client.http.get(url, headers=range_of) as response:
                assert (response.status, await response.read()) == (206, words)

    run(front, test)


def test_a_hundred_at_once_each_come_to_one_outcome(front: Orchestrator) -> None:
    before = front.metric("tidegate_slots_offered_total")

    async def test(client: Client) -> list[str]:
        async def one(number: int) -> str:
            slot = await client.submit(SHORT, deadline_ms=20_000 + 400 * number)
            if slot["http"] != 202:
                return str(slot["error"]["code"])
            *_, (_, _, last) = await client.follow(slot)
            return str(last["outcome"])

        return await asyncio.gather(*(one(number) for number in range(100)))

    outcomes = Counter(run(front, test))
    possible = {"met", "partial", "missed", "refused", "deadline_infeasible"}
    assert set(outcomes) <= possible, outcomes
    assert outcomes["met"] >= 10
    assert front.metric("tidegate_slots_offered_total") - before == 100
    settled = front.metric("tidegate_slot_outcomes_total")
    assert settled == front.metric("tidegate_slots_offered_total")
