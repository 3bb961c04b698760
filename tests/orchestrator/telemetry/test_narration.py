"""OR-15: one sentence per event, without ids and secrets, with fields; never per token."""

import logging
import re

import pytest

from orchestrator.telemetry import narration
from orchestrator.telemetry.narration import (
    LAUNCH,
    MAX_CHARS,
    POOL,
    Action,
    Actor,
    Narration,
    of_ending,
)
from pool.events import EventKind
from protocol import AbortCause, Code, Outcome
from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_worker import FakeWorker, Plan

SENTENCE = re.compile(r"[A-Z][a-zA-Z ,:']+\.")
TASK = {"prompt": "hello", "max_tokens": 8}


def every_narration() -> list[Narration]:
    found = []
    for value in vars(narration).values():
        values = value.values() if isinstance(value, dict) else (value,)
        found += [told for told in values if isinstance(told, Narration)]
    return found


def test_every_narration_is_one_short_sentence_with_nothing_filled_in() -> None:
    told = every_narration()
    assert len(told) > 30
    for each in told:
        assert len(each.sentence) <= MAX_CHARS, each
        assert SENTENCE.fullmatch(each.sentence), each
    assert {each.action for each in told} == set(Action)


def test_every_end_and_every_step_of_a_launch_is_told() -> None:
    assert set(LAUNCH) | set(POOL) == set(EventKind)
    for outcome in Outcome:
        for code in (None, *Code):
            for cause in (None, *AbortCause):
                assert of_ending(outcome, code, cause) in every_narration()
    assert of_ending(Outcome.REFUSED, Code.QUEUE_FULL, None).action is Action.REFUSE
    assert of_ending(Outcome.ABORTED, None, AbortCause.DISCONNECT).actor is Actor.CLIENT


def told(caplog: pytest.LogCaptureFixture, action: Action) -> list[dict[str, object]]:
    """The fields of what was narrated of ``action`` so far."""
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    return [each for each in fields if each.get("action") == action]


async def finish(service: Service, **changes: object) -> int:
    headers = {"X-Correlation-Id": "mine"}
    async with service.http.post("/v1/completions", json=TASK | changes, headers=headers) as answer:
        await answer.read()
        return answer.status


async def test_requests_are_told_with_their_correlation_id(
    make_service: MakeService, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "orchestrator")
    service = await make_service(worker)
    (ready,) = (each for each in told(caplog, Action.READY) if each["actor"] == Actor.WORKER)
    assert ready["target"] == worker.address
    assert await finish(service, model="fake") == 200
    assert await finish(service, model="nobody's") == 404
    worker.plan = lambda submit: Plan(stall_at=0, ignores_deadline=True)
    assert await finish(service, model="fake", deadline_ms=150, priority="batch") == 504
    for action, target in (
        (Action.PLACE, worker.address),
        (Action.ANSWER, "fake"),
        (Action.REFUSE, None),
        (Action.MISS, "fake"),
    ):
        first = told(caplog, action)[0]
        assert (first["correlation_id"], first["target"]) == ("mine", target), action


async def test_tokens_are_never_told(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "orchestrator")
    counts = []
    for tokens in (2, 60):
        caplog.clear()
        assert await finish(service, model="fake", max_tokens=tokens) == 200
        told = [r for r in caplog.records if hasattr(r, "fields") and r.module != "fleet"]
        counts.append(len(told))
    assert counts[0] == counts[1] <= 3
