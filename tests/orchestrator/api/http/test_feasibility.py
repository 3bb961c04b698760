"""DL-6 fit and DL-7 over HTTP, in every dialect, in front of an instance of a known pace."""

import math
import re

import pytest

from orchestrator.prediction import forecaster
from orchestrator.prediction.forecaster import FIT_HEADROOM
from orchestrator.prediction.step_model import ERROR
from protocol import FinishReason, OnDeadline
from tests.orchestrator.api.asking import BODIES, CHAT, TEXT, chunks_of
from tests.orchestrator.conftest import Service
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.paces import KNOWN as PACE

LONG = {"max_tokens": 400, "ignore_eos": True}
TASK = TEXT | LONG


def assert_used(fitted: int) -> None:
    """DL-16: as many tokens as usually fit into a second at ``PACE``."""
    slowest_ms = (PACE.base_ms + 2 * PACE.row_ms) * PACE.slow
    assert 1000 / slowest_ms - 2 <= fitted <= 1000 / PACE.base_ms


@pytest.fixture(autouse=True)
def held(service: Service) -> None:
    """And nothing of a second passes, however slow the machine is."""
    service.hold_time()
    service.hold_pace()


@pytest.mark.parametrize(
    ("path", "stream"),
    [("/v2/tasks", False), ("/v1/chat/completions", True), ("/v1/completions", False)],
)
async def test_dl7_certainly_infeasible_is_refused_with_what_would_do(
    service: Service, worker: FakeWorker, path: str, stream: bool
) -> None:
    asked = BODIES[path] | LONG | ({"stream": True} if stream else {})
    body = asked | {"deadline_ms": 1000}
    async with service.http.post(path, json=body) as response:
        assert response.status == 504
        assert response.headers["x-should-retry"] == "false"
        assert "X-Deadline-Exceeded-By-Ms" not in response.headers  # nothing is exceeded yet
        error = (await response.json())["error"]
    assert error["code"] == "deadline_infeasible"
    # One figure, in words and as a time: what is said is what is offered.
    named_ms = error["earliest_feasible_deadline"] - 1000 * service.clock.unix()
    (said_ms,) = re.findall(r"deadline (\d+) ms from now", error["message"])
    assert int(said_ms) == pytest.approx(named_ms, abs=2)
    assert error["predicted_finish_ms"] > 1000
    assert error["earliest_feasible_deadline"] > 1000 * service.clock.unix() + 1000
    assert error["binding_constraint"] == "decode"
    assert worker.submits == []
    assert service.outcomes() == ["refused"]
    assert service.metric("tidegate_infeasible_refused_total") == 1
    # The deadline that it names is taken.
    headers = {"X-Deadline": str(error["earliest_feasible_deadline"])}
    await service.ask("POST", path, 200, 202, json=asked, headers=headers)


async def test_dl16_what_became_of_a_named_deadline_is_learnt(service: Service) -> None:
    """On an idle service too; what is settled is not kept."""
    promises = service.orchestrator.stages.prediction.promises
    body = TASK | {"deadline_ms": 1000}
    error = await service.refused(504, "/v1/completions", json=body)
    headers = {"X-Deadline": str(error["earliest_feasible_deadline"])}
    await service.ask("POST", "/v1/completions", json=TASK, headers=headers)
    assert service.outcomes() == ["refused", "met"]
    assert not promises._claimed and not promises._held
    assert 1 <= promises._stretches["fake"][forecaster.LONG].factor < math.exp(ERROR)


MADE = 130
"""Tokens that a worker makes in that second, which is faster than it was."""


@pytest.fixture
def quicker(worker: FakeWorker) -> FakeWorker:
    worker.plan = lambda submit: Plan(tokens=MADE, reason=FinishReason.DEADLINE)
    return worker


async def test_dl6_fit_takes_what_time_there_is_and_says_so(
    service: Service, quicker: FakeWorker
) -> None:
    """DL-16: a worker that is quicker than it was gives more than was foretold."""
    path = "/v1/chat/completions"
    body = CHAT | LONG | {"deadline_ms": 1000, "on_deadline": "fit"}
    async with service.http.post(path, json=body) as response:
        assert response.status == 200
        answer = await response.json()
        assert response.headers["X-Fitted-Max-Tokens"] == str(MADE)
    assert answer["fitted_max_tokens"] == MADE == answer["usage"]["completion_tokens"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert service.outcomes() == ["met"]
    submit = quicker.submits[0]
    assert submit.on_deadline is OnDeadline.PARTIAL
    # What is reserved for it is bounded all the same.
    assert_used(submit.sampling.max_tokens // FIT_HEADROOM)


async def test_dl6_fit_is_said_in_a_streams_last_chunk(
    service: Service, quicker: FakeWorker
) -> None:
    body = TASK | {"deadline_ms": 1000, "on_deadline": "fit"}
    *chunks, last = await chunks_of(service, "/v1/completions", body)
    assert last["fitted_max_tokens"] == MADE
    assert last["choices"][0]["finish_reason"] == "length"
    assert "left=" in last["deadline_budget"]
    assert all("fitted_max_tokens" not in chunk for chunk in chunks)


async def test_dl6_fit_on_tasks(service: Service, quicker: FakeWorker) -> None:
    """What is expected at first, and in the end what it was."""
    body = TASK | {"deadline_ms": 1000, "on_deadline": "fit"}
    async with service.http.post("/v2/tasks", json=body) as response:
        assert response.status == 202
        task = await response.json()
        assert response.headers["X-Fitted-Max-Tokens"] == str(task["fitted_max_tokens"])
    assert_used(task["fitted_max_tokens"])
    events = await service.follow(task["events_url"])
    assert events[-1].event == "end"
    end = events[-1].json()
    assert end["fitted_max_tokens"] == MADE
    assert (end["outcome"], end["finish_reason"]) == ("met", "length")
    status = await service.ask("GET", f"/v2/tasks/{task['task_id']}")
    assert status["fitted_max_tokens"] == MADE == status["usage"]["completion_tokens"]
