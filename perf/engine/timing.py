"""Times of calls on a device."""

import time
from collections.abc import Callable
from typing import Final

import torch

from perf.report.stats import median

_REPEATS: Final = 15


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of ``call`` as it is, after one to warm up."""
    call()
    times = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before.record()
            call()
            after.record()
            after.synchronize()
            times.append(float(before.elapsed_time(after)))
        else:
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
    return median(times)


def copy_gb_per_s(device: torch.device, nbytes: int) -> float:
    """GB/s of a copy on the device, bytes read plus bytes written."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    there = torch.empty_like(source)
    return 2 * nbytes / timed_ms(lambda: there.copy_(source), device) / 1e6
