"""Section ``lost``, the last one: an illegal access ends the CUDA context, and a worker says so.

The worker is whole but for Triton: its lane is read here, and the end of its process is noted
instead. Everything before it on this machine has ended by then: the section's process dies with its
context.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from perf.engine.checkpoints import SHAPES, make_checkpoint
from perf.engine.runs import Prompts
from perf.report.rows import Report
from protocol import (
    PROTOCOL_VERSION,
    Code,
    Frame,
    LaneMessage,
    Open,
    Sampling,
    Submit,
    decode_frame,
    encode,
)
from protocol.tensors import FRAME, LANE_MESSAGE
from worker.loaded import LoadedEngine
from worker.service.call import Call, Tensors, strings
from worker.service.worker import Worker
from worker.settings import WorkerSettings

_JOBS: Final = 8
_WITHIN_S: Final = 10.0
_BUDGET_MS: Final = 1e6


def lost(report: Report, device: torch.device, scratch: Path, _: str) -> None:
    """Break the context beside running jobs; time until the worker has left service, ended its jobs
    and would end its process."""
    if device.type != "cuda":
        report.add("illegal access", "left out", note="a CPU has no context to lose")
        return
    from perf.engine.broken_kernel import write_far
    from worker.engines import load_engine
    from worker.runner.xid_watch import gpu_fault_of

    path = scratch / "steps"
    shape = SHAPES["small"]
    make_checkpoint(path, shape, seed=0)
    settings = WorkerSettings(model_path=path, engine="torch", device="cuda", max_running=_JOBS)
    loaded = load_engine(settings)
    zero = torch.zeros(1, device=device)
    broken(
        report,
        loaded,
        settings,
        [Prompts(shape.vocab_size, seed=11).draw(16) for _ in range(_JOBS)],
        lambda: write_far[(1,)](zero, 1 << 45),
        gpu_fault_of(settings),
    )


def broken(
    report: Report,
    loaded: LoadedEngine,
    settings: WorkerSettings,
    prompts: list[list[int]],
    break_device: Callable[[], object],
    device_fault: Callable[[], str],
) -> None:
    """Have a worker work on ``prompts``, all at once, break its device, and note what becomes of
    it: seconds from then on."""
    died_at: list[float] = []
    has_died = threading.Event()

    def die() -> None:
        died_at.append(time.monotonic())
        has_died.set()

    worker = Worker(loaded, settings, die=die, device_fault=device_fault)
    worker.start()
    lane = _Lane()
    lane.send_to(worker, Open(PROTOCOL_VERSION, "lane"))
    for handle, ids in enumerate(prompts):
        asked = Sampling(max_tokens=3600, temperature=0.0, ignore_eos=True)
        _Lane().send_to(worker, Submit("lane", handle, ids, asked, _BUDGET_MS))
    lane.wait(lambda: len(lane.speaking) == len(prompts))
    before = len(lane.ends)
    started = time.monotonic()
    break_device()
    lane.wait(lambda: len(lane.ends) == len(prompts))
    has_died.wait(_WITHIN_S)

    def told(what: str, times: list[float], note: str = "") -> None:
        report.add(f"illegal access: {what}", times[0] - started if times else "NOT", "s", note)

    told("out of service after", [at for at, frame in lane.frames if frame.draining])
    ends = sorted(at for at, _ in lane.ends)
    codes = dict(Counter(code.value if code else "none" for _, code in lane.ends))
    note = f"{before} had ended before; {codes}"
    told("jobs ended after", ends[-1:] if len(ends) == len(prompts) else [], note)
    told("the process would end after", died_at)
    late = _Lane()
    late.send_to(worker, Open(PROTOCOL_VERSION, "late"))
    late.wait(lambda: bool(late.frames))
    refusal = late.frames[0][1].error if late.frames else None
    is_refused = refusal is not None and refusal.code is Code.DRAINING
    report.add("illegal access: it takes no new lane", "yes" if is_refused else "NO")
    closing = threading.Thread(target=worker.close, daemon=True)
    closing.start()
    closing.join(_WITHIN_S)
    report.add("illegal access: its threads have ended", "NO" if closing.is_alive() else "yes")


class _Lane:
    """An orchestrator's side of one lane, a ``Responder``: its frames and when each came."""

    def __init__(self) -> None:
        self.frames: list[tuple[float, Frame]] = []
        self._changed = threading.Condition()

    def send_to(self, worker: Worker, message: LaneMessage) -> None:
        """Send ``message``, whose answers come here."""
        worker.accept(Call({LANE_MESSAGE: strings(encode(message))}, {}, "", self))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds, for as long as it may take."""
        with self._changed:
            self._changed.wait_for(condition, _WITHIN_S)

    @property
    def speaking(self) -> set[int]:
        """Handles of the jobs that have tokens."""
        return {delta.handle for _, frame in self.frames for delta in frame.deltas}

    @property
    def ends(self) -> list[tuple[float, Code | None]]:
        return [(at, end.code) for at, frame in self.frames for end in frame.ends]

    def send(self, tensors: Tensors, *, final: bool = False) -> None:
        with self._changed:
            self.frames.append((time.monotonic(), decode_frame(tensors[FRAME][0])))
            self._changed.notify_all()

    def close(self) -> None:
        """Do nothing: whoever waits has a limit."""

    def fail(self, code: Code, message: str) -> None:
        """Do nothing, as ``close``."""

    def is_cancelled(self) -> bool:
        return False
