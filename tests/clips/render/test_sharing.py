"""Clips stand back for text: the priority of threads that render, and the cap on a GPU's memory."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from clips.plan.budgets import BUDGETS, Stage, StageTimes
from clips.render.build import cap_memory
from clips.render.memory import CountedMemory, clip_guard
from clips.render.stage_runner import StageJob, StageRunner
from clips.render.stages.base import Step
from tests.clips.render.fakes import CPU


def _priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_stages_on_the_cpu_stand_back_and_nobody_else_does() -> None:
    before = _priority()
    lower = min(19, before + 3)
    runner = StageRunner(Stage.VIDEO, clip_guard(CountedMemory(lambda: 0)), CPU, nice=3)

    def work(step: Step) -> tuple[int, int]:
        started: list[int] = []
        thread = threading.Thread(target=lambda: started.append(_priority()))
        thread.start()
        thread.join()
        return _priority(), started[0]

    times = StageTimes(BUDGETS[Stage.VIDEO], 1.0)
    job = StageJob(work, 1.0, times, lambda done: None)
    assert await runner.run(job, 1e12) == (lower, lower)
    runner.close()
    assert _priority() == before


def test_a_gpus_memory_is_capped_at_the_hard_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    capped: list[float] = []
    of_16 = SimpleNamespace(total_memory=16_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_16)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: capped.append(share)
    )
    for device, hard in ((CPU, 8_000_000_000), (torch.device("cuda"), 0)):
        cap_memory(device, hard)
    assert not capped
    cap_memory(torch.device("cuda"), 8_000_000_000)
    cap_memory(torch.device("cuda"), 80_000_000_000)
    assert capped == [0.5, 1.0]
