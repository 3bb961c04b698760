"""The orchestrator's clock, passed in so that the service also runs under a simulated clock."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Timer(Protocol):
    """A callback that has not run yet."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic time in seconds, timers on it, and wall time for people."""

    def now(self) -> float:
        """Monotonic time in seconds; only differences are meaningful."""

    def unix(self) -> float:
        """Wall time: seconds since 1970, UTC."""

    def cpu_s(self) -> float:
        """CPU seconds of the calling thread; only differences are meaningful."""

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Run ``callback`` on the event loop when ``now()`` reaches ``when``."""


def process_age_s() -> float:
    """Seconds since the creation of this process, including imports; 0 without ``/proc``."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # Fields are counted after the command, which may contain spaces; this is the 22nd of
            # all (proc_pid_stat(5)).
            began_ticks = int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Boot:
    """One boot of the machine and the seconds since then. All processes see the same values until
    the next boot, independent of the wall clock. Suspended time counts."""

    id: str
    now: Callable[[], float]

    def has(self, boot_id: str | None, at: float | None) -> bool:
        """Whether ``at`` is a time in this boot, by the same clock."""
        return bool(self.id) and boot_id == self.id and at is not None and at <= self.now()


def this_boot() -> Boot:
    """The machine's current boot. Its id is empty without ``/proc``."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return Boot(file.read().strip(), lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    except (OSError, AttributeError):
        return Boot("", time.monotonic)


@dataclass(frozen=True, slots=True)
class Instant:
    """One moment on both clocks: the only place that converts wall time to budget (DL-2)."""

    mono: float
    unix: float


def instant(clock: Clock) -> Instant:
    """The present moment on both clocks."""
    return Instant(clock.now(), clock.unix())


class LoopClock:
    """The clock of the running event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now = loop.time
        self.unix = time.time
        self.cpu_s = time.thread_time

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return self._loop.call_at(when, callback)
