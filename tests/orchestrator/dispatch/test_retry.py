"""Second tries before the first token, and texts that go on elsewhere after it (OR-10, DL-12)."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.resume import is_resumable, looks_back, with_seed
from orchestrator.dispatch.retry import (
    ATTEMPTS,
    FATE_S,
    Retrier,
    RetryAfter,
    RetryBudget,
    RetryDenied,
)
from orchestrator.instances.instance import InstanceState
from orchestrator.lifecycle import UPKEEP_EVERY_S
from pool.process.ports import free_ports
from protocol import Code, FinishReason, Sampling, Submit
from tests.orchestrator.conftest import MakeService, MakeTwo, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan, saying_goodbye

FIRST_ID = 6
"""Of the fake vocabulary, after its special tokens: one id per byte from here on."""
TASK = {"prompt": "hello", "max_tokens": 20, "temperature": 0}
SAMPLED = TASK | {"temperature": 1.0}


def speak(position: int) -> tuple[int, str]:
    """A text that any instance continues with alike: a letter for each position."""
    letter = chr(ord("a") + position % 26)
    return id_of(letter), letter


def id_of(letter: str) -> int:
    """Printable ASCII comes first in the byte-level alphabet, in order from '!'."""
    return FIRST_ID + ord(letter) - ord("!")


EXPECTED = "".join(speak(len("hello") + i)[1] for i in range(20))


def text_of(events: list[Any]) -> str:
    return "".join(e.json()["text"] for e in events if e.event == "token")


def kinds_of(events: list[Any]) -> list[str]:
    """Event names, each run of equal ones once."""
    names = [e.event for e in events]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


# ── before the first token ───────────────────────────────────────────────────────────────────────


async def test_or10_a_job_lost_before_its_first_token_runs_elsewhere(make_two: MakeTwo) -> None:
    service, first, second = await make_two()
    first.plan = lambda submit: Plan(die_at=0)
    second.plan = lambda submit: Plan(speak=speak)
    events = await service.run(SAMPLED)
    assert kinds_of(events) == ["queued", "started", "token", "end"]
    assert text_of(events) == EXPECTED
    assert (len(first.submits), len(second.submits)) == (1, 1)
    assert service.outcomes() == ["met"]
    assert service.metric("tidegate_retries_total", kind="retry") == 1


@pytest.mark.parametrize("code", [Code.QUEUE_FULL, Code.NO_CAPACITY, Code.DRAINING])
async def test_or10_a_job_that_an_instance_will_not_take_goes_to_another(
    make_two: MakeTwo, code: Code
) -> None:
    service, first, second = await make_two()
    first.plan = lambda submit: Plan(refuse=(code, "not now"))
    for _ in range(3):
        assert kinds_of(await service.run(TASK))[-1] == "end"
    assert len(second.submits) == 3
    assert service.outcomes() == ["met"] * 3


async def test_or10_the_only_instance_is_asked_again_after_a_pause(
    service: Service, worker: FakeWorker
) -> None:
    refusal = Plan(refuse=(Code.QUEUE_FULL, "full"))
    worker.plan = lambda submit: refusal if len(worker.submits) < 3 else Plan()
    assert kinds_of(await service.run(TASK))[-1] == "end"
    assert len(worker.submits) == 3


async def test_or10_there_is_an_end_to_tries(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(refuse=(Code.NO_CAPACITY, "no room"))
    events = await service.run(TASK)
    assert (events[-1].event, events[-1].json()["code"]) == ("error", "no_capacity")
    assert len(worker.submits) == ATTEMPTS
    assert service.outcomes() == ["refused"]
    assert service.metric("tidegate_retries_denied_total", why="attempts") == 1


@pytest.mark.parametrize(
    ("why", "plan", "settings", "code"),
    [
        ("budget", Plan(die_at=0), {"RETRY_SHARE": 0.0}, "instance_lost"),
        ("pinned", Plan(die_at=0), {}, "instance_lost"),  # it would wait for one that is gone
        ("wrong", Plan(refuse=(Code.INVALID_REQUEST, "bad")), {}, "invalid_request"),
    ],
)
async def test_or10_what_is_not_tried_again(
    make_two: MakeTwo, why: str, plan: Plan, settings: dict[str, float], code: str
) -> None:
    """OR-7 as well: a pinned job."""
    service, first, second = await make_two(**settings)
    first.does(plan)
    pinned = {"placement": {"mode": "pin", "instances": [first.address]}}
    end = (await service.run(TASK | pinned if why == "pinned" else TASK))[-1]
    assert (end.event, end.json()["code"]) == ("error", code)
    assert second.submits == []
    assert service.metric("tidegate_retries_denied_total", why="budget") == (why == "budget")


@given(
    share=st.floats(0.05, 1.0),
    offers=st.lists(st.booleans(), max_size=300),
)
def test_or10_second_tries_never_exceed_their_share(share: float, offers: list[bool]) -> None:
    budget = RetryBudget(share)
    spent = offered = 0
    for is_offer in offers:
        if is_offer:
            budget.offered()
            offered += 1
        elif not budget.is_empty:
            budget.spend()
            spent += 1
        assert spent <= 1 / share + share * offered + 1e-6


async def test_dl12_none_where_the_deadline_could_not_be_kept(make_two: MakeTwo) -> None:
    service, first, _ = await make_two()
    first.plan = lambda submit: Plan(stall_at=0)
    told = await service.ask("POST", "/v2/tasks", 202, json=TASK | {"deadline_ms": 60_000})
    task = service.orchestrator.store.get(told["task_id"])
    retrier, end = service.parts.retrier, task.deadline.at
    assert retrier.decide(task, first.address, end - 0.005) is None
    assert retrier.denied == {RetryDenied.DEADLINE: 1}
    assert retrier.decide(task, first.address, end - 30) is not None


async def test_or10_a_task_cancelled_in_its_pause_is_not_sent_again(
    service: Service, worker: FakeWorker
) -> None:
    worker.plan = lambda submit: Plan(refuse=(Code.QUEUE_FULL, "full"))
    task = (await service.ask("POST", "/v2/tasks", 202, json=TASK))["task_id"]
    await service.until(lambda: service.parts.retrier.granted["retry"] == 1)
    await service.ask("DELETE", f"/v2/tasks/{task}", 202)
    sent = len(worker.submits)
    await asyncio.sleep(0.1)  # longer than the pause
    assert len(worker.submits) == sent
    assert service.outcomes() == ["aborted"]


# ── an instance that falls silent ────────────────────────────────────────────────────────────────


async def test_or10_what_waits_on_a_silent_instance_moves_at_once(make_two: MakeTwo) -> None:
    """A grey failure (SIGSTOP): nothing is closed, nothing comes."""
    service, first, second = await make_two(SUSPECT_AFTER_S=0.3, DOWN_AFTER_S=30)
    first.does(Plan(stall_at=0, speak=speak))
    second.plan = lambda submit: Plan(speak=speak)
    running = asyncio.create_task(service.run(SAMPLED))
    await first.until(lambda: first.running == 1)
    first.silent = True
    events = await running
    assert kinds_of(events) == ["queued", "started", "token", "end"]
    assert text_of(events) == EXPECTED
    await first.until(lambda: len(first.cancels) == 1)  # told to stop as soon as it listens
    first.silent = False
    await service.until(lambda: all(i.ready for i in service.orchestrator.registry))
    assert service.outcomes() == ["met"]


async def test_or25_a_text_that_outlasts_its_servers_goodbye_goes_on(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """Only one of them: two that leave at the same time may leave nobody to go on."""
    ports = sorted(await asyncio.to_thread(free_ports, 2), key=str)
    options = saying_goodbye(after_ms=1000, grace_ms=100)  # a busy machine needs this long to ask
    first = await make_worker(port=ports[0], options=options)
    second = await make_worker(port=ports[1])
    service = await make_service(first, second)
    first.does(Plan(stall_at=5, speak=speak))
    second.plan = lambda submit: Plan(speak=speak)
    events = await service.run(SAMPLED)
    assert text_of(events) == EXPECTED
    assert [len(worker.submits) for worker in (first, second)] == [1, 1]
    assert service.outcomes() == ["met"]


async def test_or10_a_fault_while_one_is_judged_costs_no_other_its_retry(
    make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, first, second = await make_two(SUSPECT_AFTER_S=0.3, DOWN_AFTER_S=30)
    first.does(Plan(stall_at=0, speak=speak))
    second.plan = lambda submit: Plan(speak=speak)
    pinned = {"placement": {"mode": "prefer", "instances": [first.address]}}
    running = [asyncio.create_task(service.run(SAMPLED | pinned)) for _ in range(2)]
    await first.until(lambda: first.running == 2)
    decide, calls = Retrier.decide, []

    def fails_once(self: Retrier, *args: Any, **rest: Any) -> RetryAfter | None:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("a fault of ours")
        return decide(self, *args, **rest)

    monkeypatch.setattr(Retrier, "decide", fails_once)
    first.silent = True
    for events in await asyncio.gather(*running):
        assert text_of(events) == EXPECTED
    assert len(calls) == 3
    first.silent = False
    await service.until(lambda: all(i.ready for i in service.orchestrator.registry))


async def test_or10_late_tokens_of_the_first_instance_are_not_the_tasks(make_two: MakeTwo) -> None:
    service, first, second = await make_two(SUSPECT_AFTER_S=0.3, DOWN_AFTER_S=30)
    held = Plan(stall_at=0, ignores_cancel=True, text=lambda index: "WRONG")
    slow = Plan(stall_at=10, speak=speak)
    first.plan = lambda submit: held
    second.plan = lambda submit: slow
    running = asyncio.create_task(service.run(SAMPLED))
    await first.until(lambda: first.running == 1)
    first.silent = True
    await second.until(lambda: second.running == 1)
    first.silent = False
    held.release.set()
    await service.until(lambda: service.metric("tidegate_tokens_late_total") == 20)
    slow.release.set()
    assert text_of(await running) == EXPECTED
    assert service.outcomes() == ["met"]
    assert all(i.load == 0 for i in service.orchestrator.registry)


async def test_or10_with_nowhere_to_go_work_stays_with_a_silent_instance(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, SUSPECT_AFTER_S=0.3, DOWN_AFTER_S=30)
    plan = worker.does(Plan(stall_at=0))
    running = asyncio.create_task(service.run(TASK))
    await worker.until(lambda: worker.running == 1)
    worker.silent = True
    instance = next(iter(service.orchestrator.registry))
    await service.until(lambda: instance.state is InstanceState.SUSPECT)
    await asyncio.sleep(2 * UPKEEP_EVERY_S)
    worker.silent = False
    await service.until_ready()
    plan.release.set()
    assert (await running)[-1].event == "end"
    assert worker.cancels == []


# ── after the first token ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}])
async def test_or10_a_text_whose_instance_dies_goes_on_elsewhere(
    make_two: MakeTwo, sampling: dict[str, Any]
) -> None:
    """OR-10: no token is lost or repeated."""
    service, first, second = await make_two()
    first.plan = lambda submit: Plan(speak=speak, die_at=7)
    second.plan = lambda submit: Plan(speak=speak)
    events = await service.run(TASK | sampling | {"min_tokens": 10})
    assert kinds_of(events) == ["queued", "started", "token", "end"]
    assert text_of(events) == EXPECTED
    tokens = [e.json() for e in events if e.event == "token"]
    assert [t["index"] for t in tokens] == list(range(20))
    before, after = first.submits[0], second.submits[0]
    assert after.token_ids == [*before.token_ids, *(speak(5 + i)[0] for i in range(7))]
    assert (after.sampling.max_tokens, after.sampling.min_tokens) == (13, 3)
    assert after.sampling.seed == before.sampling.seed
    assert service.outcomes() == ["met"]
    assert service.metric("tidegate_tokens_generated_total") == 20
    assert service.metric("tidegate_retries_total", kind="continue") == 1


async def test_dl14_a_text_that_goes_on_elsewhere_keeps_its_schedule(make_two: MakeTwo) -> None:
    """What is due next is the next token of the text, not the first of the job."""
    service, first, second = await make_two()
    first.plan = lambda submit: Plan(speak=speak, die_at=7)
    second.plan = lambda submit: Plan(speak=speak)
    body = TASK | {"first_token_ms": 20_000, "token_gap_ms": 10_000}
    assert text_of(await service.run(body)) == EXPECTED
    before, after = first.submits[0], second.submits[0]
    assert before.first_token_budget_ms is not None and after.first_token_budget_ms is not None
    assert before.first_token_budget_ms <= 20_000
    assert 80_000 < after.first_token_budget_ms <= 90_000
    assert after.token_gap_ms == 10_000
    assert service.outcomes() == ["met"]


# ── what workers die of ──────────────────────────────────────────────────────────────────────────


async def three(
    make_worker: MakeWorker, make_service: MakeService, **changes: object
) -> tuple[Service, list[FakeWorker]]:
    workers = [await make_worker() for _ in range(3)]
    service = await make_service(*workers, **changes)
    return service, workers


def fail_all(workers: list[FakeWorker], way: str) -> None:
    """Each fails of the first job that it is given."""

    def plan_of(worker: FakeWorker) -> Callable[[Submit], Plan]:
        def plan(submit: Submit) -> Plan:
            if len(worker.submits) > 1:
                return Plan(speak=speak)
            if way == "the worker says so":
                return Plan(refuse=(Code.INSTANCE_LOST, "the engine failed as a whole"))
            if way == "it is back as another process":
                worker.process_id += " and another"
            return Plan(speak=speak, die_at=0)

        return plan

    for worker in workers:
        worker.plan = plan_of(worker)


@pytest.mark.parametrize("way", ["the worker says so", "it is back as another process"])
async def test_a_request_that_two_workers_died_with_is_not_sent_to_a_third(
    make_worker: MakeWorker, make_service: MakeService, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    service, workers = await three(make_worker, make_service)
    fail_all(workers, way)
    with caplog.at_level("INFO"):
        events = await service.run(TASK)
    end = events[-1].json()
    assert (events[-1].event, end["code"], end["retryable"]) == ("error", "poison_request", False)
    assert sum(len(worker.submits) for worker in workers) == 2
    assert service.metric("tidegate_retries_denied_total", why="poison") == 1
    assert "two workers died while they had it" in caplog.text
    assert kinds_of(await service.run(TASK))[-1] == "end", "the third is well"
    assert service.outcomes() == ["failed", "met"]


async def test_a_request_whose_workers_were_only_cut_off_is_sent_to_a_third(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    service, workers = await three(make_worker, make_service, ATTEMPTS=4)
    fail_all(workers, "the network")
    assert text_of(await service.run(TASK)) == EXPECTED
    assert service.metric("tidegate_retries_denied_total", why="poison") == 0


async def test_workers_that_do_not_come_back_died(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """A task waits for them as long as that is worth it, and no third one is risked."""
    service, workers = await three(make_worker, make_service)
    for worker in workers:
        worker.plan = lambda submit: Plan(stall_at=0)
    running = asyncio.create_task(service.run(TASK | {"deadline_ms": 600_000}))
    for lost in range(2):
        await service.until(lambda lost=lost: sum(len(w.submits) for w in workers) == lost + 1)  # type: ignore[misc]
        (holder,) = [worker for worker in workers if worker.running]
        await holder.stop()
    await asyncio.sleep(0.3)
    assert not running.done() and sum(len(worker.submits) for worker in workers) == 2
    service.leap(FATE_S)
    assert (await running)[-1].json()["code"] == "poison_request"
    assert sum(len(worker.submits) for worker in workers) == 2


async def test_or10_only_the_last_word_was_lost(make_two: MakeTwo) -> None:
    """All tokens had come: nothing is left to generate anywhere."""
    service, first, second = await make_two()
    first.plan = lambda submit: Plan(speak=speak, tokens=21, die_at=20)
    events = await service.run(TASK)
    assert text_of(events) == EXPECTED
    assert events[-1].json()["finish_reason"] == FinishReason.LENGTH
    assert second.submits == []
    assert service.outcomes() == ["met"]


def half_a_character(position: int) -> tuple[int, str]:
    """After six letters the first byte of a character of two, which prints nothing yet."""
    return speak(position) if position < len("hello") + 6 else (id_of("!") + 200, "")


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        ({"speak": speak}, {"stop": "zzz"}),
        ({"speak": speak}, {"presence_penalty": 0.5}),
        ({"speak": half_a_character}, {}),
        ({"text": lambda index: "made up"}, {}),
    ],
)
@pytest.mark.parametrize("can_continue", [True, False])
async def test_or10_only_workers_that_know_how_go_on_with_texts_that_look_back(
    make_two: MakeTwo, plan: dict[str, Any], changes: dict[str, Any], can_continue: bool
) -> None:
    """Else they end with a retriable error."""
    service, first, second = await make_two(card={"can_continue": can_continue})
    first.plan = lambda submit: Plan(die_at=7, **plan)
    events = await service.run(TASK | changes | {"min_tokens": 9, "logprobs": 1})
    if can_continue:
        assert service.outcomes() == ["met"]
        after = second.submits[0]
        assert (after.begun_tokens, after.stop_after_tokens) == (7, 9)
        assert (after.sampling.max_tokens, after.sampling.min_tokens) == (13, 2)
        tokens = [e.json() for e in events if e.event == "token"]
        assert [t["index"] for t in tokens] == list(range(20))
        assert all("logprob" in token for token in tokens)
        return
    assert (events[-1].event, events[-1].json()["code"]) == ("error", "instance_lost")
    assert events[-1].json()["retryable"] is True
    assert second.submits == []
    assert service.outcomes() == ["failed"]
    assert service.metric("tidegate_retries_denied_total", why="text") == 1


async def test_or10_a_sampled_text_without_a_seed_goes_on_with_one_of_ours(
    make_two: MakeTwo,
) -> None:
    """So its draws are the same, and those of others are not."""
    service, first, second = await make_two(card={"can_continue": True})
    first.plan = lambda submit: Plan(speak=speak, die_at=7)
    second.plan = lambda submit: Plan(speak=speak)
    for _ in range(2):
        assert text_of(await service.run(SAMPLED)) == EXPECTED
        await service.until(lambda: all(i.ready for i in service.orchestrator.registry))
    seeds = [submit.sampling.seed for submit in first.submits]
    assert None not in seeds and len(set(seeds)) == len(seeds)
    assert {submit.sampling.seed for submit in second.submits} >= set(seeds)


async def test_or10_a_text_that_may_lack_only_its_end_is_asked_for_elsewhere(
    make_two: MakeTwo,
) -> None:
    """All tokens had come, and a worker may still hold something of the text back."""
    service, first, second = await make_two(card={"can_continue": True})
    first.plan = lambda submit: Plan(text=lambda index: "", tokens=21, die_at=20)
    second.plan = lambda submit: Plan(tail="ST")
    events = await service.run(TASK | {"stop": "STOP"})
    assert (text_of(events), service.outcomes()) == ("ST", ["met"])
    assert second.submits[0].sampling.max_tokens == 0


async def test_or10_other_weights_do_not_go_on_with_a_text(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    workers = [await make_worker(model_digest=digest) for digest in ("one", "two")]
    for worker in workers:
        worker.plan = lambda submit: Plan(speak=speak, die_at=7)
    service = await make_service(*workers)
    events = await service.run(TASK)
    assert events[-1].json()["code"] == "instance_lost"
    assert sum(len(worker.submits) for worker in workers) == 1


@for_each(
    ("changes", "can", "looks"),
    [
        ({"temperature": 0.0}, True, False),
        ({"temperature": 1.0}, False, False),
        ({"temperature": 1.0, "seed": 0}, True, False),
        ({"temperature": 0.0, "stop": ("x",)}, True, True),
        ({"temperature": 0.0, "stop_token_ids": (9,)}, True, True),
        ({"temperature": 0.0, "skip_special_tokens": False}, True, True),
        ({"temperature": 0.0, "logprobs": 0}, True, False),
        ({"temperature": 0.0, "prompt_logprobs": 0}, True, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, True, True),
        ({"temperature": 0.0, "presence_penalty": 0.1}, True, True),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, True, True),
        ({"temperature": 0.0, "logit_bias": ((3, -1.0),), "min_tokens": 2}, True, False),
    ],
)
def test_or10_which_requests_can_go_on(changes: dict[str, Any], can: bool, looks: bool) -> None:
    sampling = Sampling(max_tokens=5, **changes)
    assert (is_resumable(sampling), looks_back(sampling)) == (can, looks)
    assert is_resumable(with_seed(sampling, random.Random(1)))
