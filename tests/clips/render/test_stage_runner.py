"""What a stage leaves on its device when it ends early."""

from contextlib import nullcontext

import pytest
import torch

from clips.plan.budgets import Stage, StageBudget, StageTimes
from clips.render.errors import StageFailed
from clips.render.memory import CountedMemory, clip_guard
from clips.render.stage_runner import StageJob, StageRunner
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
    runner = StageRunner(Stage.VIDEO, clip_guard(CountedMemory(lambda: 0)), CPU)
    runner._stream = _Stream(done)  # type: ignore[assignment]

    def work(step: Step) -> None:
        raise error

    times = StageTimes(StageBudget(1.0, 10.0), 1.0)
    with pytest.raises(raised):
        await runner.run(StageJob(work, 1.0, times, lambda share: None), 1e12)
    runner.close()
    assert done == left
