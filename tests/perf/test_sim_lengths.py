"""Lengths are foretold by kind of prompt, in the whole service."""

import asyncio
import random

import pytest

from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from perf.sim.arrivals import SimArrival
from perf.sim.replay.loop import VirtualClock, VirtualLoop, run_quietly
from perf.sim.scenes import FLEET
from perf.sim.simulate import new_job, new_orchestrator

pytestmark = pytest.mark.slow


async def _ended(task: Task) -> None:
    is_over = asyncio.Event()
    task.on_end.append(lambda _: is_over.set())
    await is_over.wait()


def test_a_tasks_forecast_goes_by_the_kind_of_its_prompt() -> None:
    """In the service: after short answers to one kind of prompt and long ones to another, a new
    task of each is foretold to be short, and long."""
    arrival = SimArrival(0.0, 40, 400, 1, 60_000.0, "", Priority.INTERACTIVE)

    async def usual(loop: VirtualLoop) -> list[int]:
        parts = new_orchestrator(FLEET, VirtualClock(loop), {}, random.Random(1)).parts
        parts.lifecycle.start()
        foretold = [0, 0]
        for turn in range(12):
            for kind, length in enumerate((4, 200)):
                job, _ = new_job(arrival, loop.time(), 60_000.0)
                prompt = (7 + kind,) * 39 + (length,)  # the last id tells the worker the length
                task = await parts.orchestrator.submit(job, prompt)
                foretold[kind] = parts.orchestrator.stages.prediction.forecaster.usual_tokens(task)
                await _ended(task)
                assert task.completion_tokens == length, turn
        await parts.lifecycle.close()
        return foretold

    short, long = run_quietly(usual)
    assert short < 12 and long > 100
