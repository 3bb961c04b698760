"""A device that dies in every way: the worker leaves service, its jobs end once, its process ends.

The device is simulated, and told by a file. From there on everything is as on a GPU: the probe, the
watch of the driver, the engine, the drain, the process's end.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import PROTOCOL_VERSION, Code, Frame, Open, Sampling, Submit
from tests.support.engine import EOS, Bench
from tests.support.triton_calls import FakeResponder, lane_call
from tests.worker.service.conftest import loaded_by
from worker.engine.engine import Engine, EngineConfig
from worker.runner.device_probe import DeviceProbe
from worker.runner.simulated_device import DeviceFault, SimulatedDevice
from worker.runner.synthetic import PacedRunner, StepCost
from worker.runner.xid_watch import XidWatch
from worker.service import failure
from worker.service.worker import Worker
from worker.settings import WorkerSettings
from worker.text import Tokenizer

RUN, WAIT = 4, 2
TOKENS = 4000
"""More than anybody waits for."""
HANGS_AFTER_S = 1.0


class Dying:
    """A worker over a device that fails as ``fail`` says, with a lane and jobs."""

    def __init__(self, tokenizer: Tokenizer, file: Path) -> None:
        self.ended = threading.Event()
        self._file = file
        settings = WorkerSettings(model_path=Path("unused"))
        bench = Bench(blocks=RUN * TOKENS, context_tokens=2 * TOKENS, max_running=RUN)
        self.device = SimulatedDevice(file)
        runner = PacedRunner([7], StepCost(0.02), device=self.device)
        watch = XidWatch(self.device.next_xid, DeviceProbe(self.device.answer))
        self.worker = Worker(
            loaded_by(tokenizer, Engine(bench.scheduler, runner, EngineConfig([EOS]))),
            settings,
            die=self.ended.set,
            device_fault=lambda: watch.fault,
        )
        self.lane = FakeResponder()

    def start(self) -> None:
        """Returns once all that can run does."""
        self.worker.start()
        self.worker.accept(lane_call(Open(PROTOCOL_VERSION, "lane", ""), self.lane))
        for handle in range(RUN + WAIT):
            sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
            submit = Submit("lane", handle, [1, 2], sampling, 1e6)
            self.worker.accept(lane_call(submit, FakeResponder()))
        self.lane.wait(lambda: len(self.speaking()) == RUN, "the first tokens of all that run")

    def speaking(self) -> set[int]:
        return {delta.handle for frame in self.frames() for delta in frame.deltas}

    def frames(self) -> list[Frame]:
        return self.lane.frames()

    def fail(self, fault: DeviceFault) -> None:
        self._file.write_text(f"{fault} {os.getpid()}")

    def close(self) -> None:
        self.device.release()
        self.worker.close()


@pytest.fixture
def dying(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dying]:
    monkeypatch.setattr(failure, "LAST_WORDS_S", 0.02)
    monkeypatch.setattr(failure, "STEP_TIMEOUT_S", HANGS_AFTER_S)
    dying = Dying(tokenizer, tmp_path / "fault")
    yield dying
    dying.close()


@pytest.mark.parametrize("fault", list(DeviceFault))
def test_a_device_that_dies_in_any_way_takes_its_worker_out_of_service(
    dying: Dying, fault: DeviceFault
) -> None:
    dying.start()
    dying.fail(fault)
    dying.lane.wait_final()
    frames = dying.frames()
    left_at = next(
        at
        for at, frame in enumerate(frames)
        if frame.draining or (frame.stats is not None and frame.stats.stuck_ms)
    )
    assert not any(frame.ends for frame in frames[:left_at]), "nobody sends them here again"
    ends = [(end.handle, end.code) for frame in frames for end in frame.ends]
    assert sorted(handle for handle, _ in ends) == list(range(RUN + WAIT)), "each once"
    # To be sent elsewhere: those that had begun within what a death allows, the others at once.
    assert Counter(code for _, code in ends) == {Code.INSTANCE_LOST: RUN, Code.DRAINING: WAIT}
    assert dying.ended.wait(60), "its supervisor starts another process"
    late = FakeResponder()
    dying.worker.accept(lane_call(Open(PROTOCOL_VERSION, "late", ""), late))
    late.wait(lambda: late.sent, "the refusal")
    error = late.frames()[0].error
    assert error is not None and error.code is Code.DRAINING
