"""DL-15 over real sockets: a free slot is used at once, whatever is predicted; nothing leaks."""

import asyncio
import random
import time
from typing import Any

import pytest

from orchestrator.prediction.urgency import Urgency
from protocol import Submit
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.fake_worker import FakeWorker, Plan

CHAT = {
    "model": "fake",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 400,
    "deadline_ms": 2000,
    "on_deadline": "partial",
}


async def ask(service: Service, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return await service.answer("POST", path, json=body)


def speaks(worker: FakeWorker, step_s: float = 0.005) -> None:
    """Answers are as many tokens long as a stated ``seed`` says, however much is allowed; 9 where
    the orchestrator drew it."""
    worker.step_ms = 1000 * step_s

    def plan(submit: Submit) -> Plan:
        seed = submit.sampling.seed or 9
        length = seed if seed < 1000 else 9
        return Plan(tokens=min(submit.sampling.max_tokens, length), step_s=step_s)

    worker.plan = plan


async def leaves_nothing(service: Service, *workers: FakeWorker) -> None:
    orchestrator = service.orchestrator
    await service.until(
        lambda: not orchestrator.live_tasks and not orchestrator.stages.dispatcher._in_flight
    )
    for worker in workers:
        await worker.until(lambda w=worker: w.running == 0)  # type: ignore[misc]
    orchestrator.queue.check_integrity()
    assert not orchestrator.queue
    for instance in orchestrator.registry:
        instance.concurrency.check_integrity()
        assert instance.concurrency.paused == instance.load == 0


@pytest.mark.parametrize("chance", [0.0, 1.0])
async def test_dl15_a_free_slot_takes_who_waits_whatever_is_predicted(
    make_worker: MakeWorker,
    make_service: MakeService,
    monkeypatch: pytest.MonkeyPatch,
    chance: float,
) -> None:
    """Said to be hopeless, they are sent at once, and as soon as a slot falls free."""
    worker = await make_worker(max_running=2)
    speaks(worker, 0.01)
    service = await make_service(worker)
    log = float("-inf") if not chance else 0.0
    found = Urgency(chance, log, 1e5)
    monkeypatch.setattr(service.parts.forecaster, "urgency", lambda task, now: found)
    began = time.monotonic()
    bodies = [CHAT | {"seed": 10, "deadline_ms": 20_000} for _ in range(6)]
    answers = await asyncio.gather(*(ask(service, "/v1/chat/completions", b) for b in bodies))
    assert [status for status, _ in answers] == [200] * 6
    assert service.outcomes() == ["met"] * 6
    # Three rounds; a plan that held anything back would show as a deadline, not as some more ms.
    assert time.monotonic() - began < 10
    await leaves_nothing(service, worker)


@pytest.mark.parametrize("seed", range(2))
async def test_dl10_pauses_cancels_deadlines_and_losses_in_any_order_leak_nothing(
    make_worker: MakeWorker, make_service: MakeService, seed: int
) -> None:
    """The fixture sees to it that each has exactly one outcome."""
    rng = random.Random(seed)
    workers = [await make_worker(max_running=2, can_pause=True) for _ in range(2)]

    def plan(submit: Submit) -> Plan:
        return Plan(
            tokens=rng.randint(1, 40), step_s=0.003, die_at=40 if rng.random() < 0.02 else None
        )

    for worker in workers:
        worker.step_ms, worker.plan = 3.0, plan
    service = await make_service(*workers, MOST_BACKLOG=0)

    async def one() -> None:
        await asyncio.sleep(rng.uniform(0, 0.6))
        body = {
            "prompt": "x" * rng.randint(1, 60),
            "max_tokens": 50,
            "deadline_ms": rng.choice([60, 150, 400, 30_000, 30_000]),
            "on_deadline": rng.choice(["error", "partial", "fit"]),
            "priority": rng.choice(["interactive", "batch"]),
        }
        status, answer = await service.answer("POST", "/v2/tasks", json=body)
        if status == 202 and rng.random() < 0.25:
            await asyncio.sleep(rng.uniform(0, 0.2))
            await service.ask("DELETE", f"/v2/tasks/{answer['task_id']}", 202)

    await asyncio.gather(*(one() for _ in range(60)))
    await leaves_nothing(service, *workers)
    assert len(service.outcomes()) == 60
    assert "failed" not in service.outcomes() or any(len(w.opens) > 1 for w in workers)
