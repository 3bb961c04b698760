"""What a stage leaves on its device when it ends early."""

import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from clips.plan.budgets import BUDGETS, ClipStage, StageBudget, StageTimes
from clips.render.build import cap_memory
from clips.render.errors import StageFailed
from clips.render.memory import CountedMemory, clip_guard
from clips.render.stage_runner import NICE, StageRunner
from clips.render.stages.base import Step
from tests.clips.render.fakes import CPU
from worker.errors import InvalidCall, MemoryLimitExceeded


class _Stream:
    def __init__(self, done: list[str]) -> None:
        self._done = done

    def synchronize(self) -> None:
        self._done.append("synchronized")


@pytest.mark.parametrize(
    ("error", "raised", "left"),
    [
        (RuntimeError("illegal memory access"), StageFailed, ["synchronized", "emptied"]),
        (torch.OutOfMemoryError("CUDA"), MemoryLimitExceeded, ["synchronized", "emptied"]),
        (InvalidCall("no such voice"), InvalidCall, ["synchronized"]),
    ],
)
async def test_the_device_is_waited_for_and_after_a_failure_its_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception], left: list[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    times = StageTimes(StageBudget(1.0, 10.0), 1.0)
    runner = StageRunner(ClipStage.VIDEO, times, clip_guard(CountedMemory(lambda: 0)), CPU)
    runner._stream = _Stream(done)  # type: ignore[assignment]

    def work(step: Step) -> None:
        raise error

    with pytest.raises(raised):
        await runner.run(work, 1.0, 1e12, lambda share: None)
    runner.close()
    assert done == left


def _priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_stages_on_the_cpu_stand_back_and_nobody_else_does() -> None:
    before = _priority()
    lower = min(19, before + NICE)
    times = StageTimes(BUDGETS[ClipStage.VIDEO], 1.0)
    runner = StageRunner(ClipStage.VIDEO, times, clip_guard(CountedMemory(lambda: 0)), CPU)

    def work(step: Step) -> tuple[int, int]:
        started: list[int] = []
        thread = threading.Thread(target=lambda: started.append(_priority()))
        thread.start()
        thread.join()
        return _priority(), started[0]

    assert await runner.run(work, 1.0, 1e12, lambda done: None) == (lower, lower)
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
