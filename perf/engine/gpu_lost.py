"""Section ``lost``, the last one: an illegal access ends the CUDA context, and the engine says so.

Everything before it on this machine has ended by then: the section's process dies with its context.
"""

import threading
import time
from pathlib import Path

import torch

from perf.engine.bare_engine import build, load
from perf.engine.checkpoints import SHAPES, make_checkpoint
from perf.engine.runs import Prompts, greedy
from perf.report.rows import Report
from worker.core import Event, JobFinished

_WITHIN_S = 10.0


def lost(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """Break the context beside running jobs; time until the engine has failed and ended them."""
    if device.type != "cuda":
        report.add("illegal access", "left out", note="a CPU has no context to lose")
        return
    path = scratch / "steps"
    make_checkpoint(path, SHAPES["small"], seed=0)
    model, config = load(path, device)
    built = build(model, config, device, max_running=8, blocks=8 * 240)
    ended: dict[int, tuple[str, str]] = {}
    all_ended = threading.Event()

    def sink(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, JobFinished):
                ended[id(event.job)] = (event.reason.value, event.message)
        if len(ended) == 8:
            all_ended.set()

    from perf.engine.broken_kernel import write_far

    prompts = Prompts(config.vocab_size, seed=11)
    built.engine.start(sink)
    for _ in range(8):
        built.engine.submit(greedy(prompts.draw(16), 3600))
    time.sleep(0.3)
    before = len(ended)
    started = time.monotonic()
    write_far[(1,)](torch.zeros(1, device=device), 1 << 45)
    in_time = all_ended.wait(_WITHIN_S)
    seconds = time.monotonic() - started
    reasons = sorted(set(ended.values()))
    report.add(
        "illegal access: jobs ended after",
        seconds if in_time else "NOT",
        "s",
        f"{before} had ended before; {reasons}",
    )
    failed = built.engine.has_failed
    report.add("illegal access: the engine has failed", "yes" if failed else "NO")
    started = time.monotonic()
    stopping = threading.Thread(target=built.engine.stop, daemon=True)
    stopping.start()
    stopping.join(_WITHIN_S)
    stopped = "NOT" if stopping.is_alive() else time.monotonic() - started
    report.add("illegal access: engine stopped after", stopped, "s")
