"""CPU, memory, files and threads that a server uses, with all of its processes."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from perf.report.stats import median
from pool.process.proc import children_of

_SCHED = 2


def process_cpu_s(pid: int) -> float:
    """CPU seconds that ``pid`` has used, user and system, including ended threads.

    It reads the CPU-time clock of ``clock_getcpuclockid(3)``, which is exact; ``/proc/PID/stat``
    counts ticks of 10 ms. Raises ``ProcessLookupError`` if the process is gone.
    """
    try:
        return time.clock_gettime((~pid << 3) | _SCHED)
    except OSError as error:
        raise ProcessLookupError(f"no process {pid}") from error


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run ``count`` processes that load one core each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


_MIB = 2**20
_SHM = "/dev/shm/"
PARTS: Final = 10
"""Number of parts of a long run. Caches and buffers fill in the first, so growth counts from the
second on."""
_LOOK_EVERY_S: Final = 5.0
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """Total usage of some processes. Shared pages count for each process."""

    rss_mib: float
    shm_mib: float
    """MiB of mapped files in ``/dev/shm``, each counted once."""
    fds: int
    threads: int
    processes: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Current usage of ``pid`` and its descendants. Processes that end during the read are
        skipped."""
        return cls.of_each(tree(pid))

    @classmethod
    def of_each(cls, pids: Iterable[int]) -> Self:
        """Current usage of ``pids``, without their descendants."""
        rss = 0.0
        fds = threads = processes = 0
        mapped: dict[tuple[int, int], int] = {}
        for each in pids:
            with suppress(*_GONE):
                proc = Path(f"/proc/{each}")
                rss += rss_mib(each)
                fds += len(os.listdir(proc / "fd"))
                threads += len(os.listdir(proc / "task"))
                mapped |= _mapped(proc)
                processes += 1
        return cls(
            rss_mib=rss,
            shm_mib=sum(mapped.values()) / _MIB,
            fds=fds,
            threads=threads,
            processes=processes,
        )


def rss_mib(pid: int) -> float:
    """Resident memory of a process in MiB. Raises ``FileNotFoundError`` or ``ProcessLookupError``
    when it is gone."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def tree(pid: int) -> Iterator[int]:
    """``pid`` and all of its descendants."""
    yield pid
    for child in children_of(pid):
        yield from tree(child)


def _mapped(proc: Path) -> dict[tuple[int, int], int]:
    """Allocated bytes of each file in ``/dev/shm`` that the process maps."""
    found: dict[tuple[int, int], int] = {}
    for line in (proc / "maps").read_text().splitlines():
        at = line.find(_SHM)
        if at >= 0:
            with suppress(OSError):
                stat = os.stat(line[at:])
                found[stat.st_dev, stat.st_ino] = 512 * stat.st_blocks
    return found


@dataclass(slots=True)
class Looks:
    """Usage samples of processes during a long run of ``seconds``, grouped by tenths."""

    taken: list[tuple[float, Mapping[str, ServerUsage]]] = field(default_factory=list)
    """Seconds into the run, and the usage of each part then."""
    seconds: float = 0.0

    @asynccontextmanager
    async def looking(self, look: Callable[[], Mapping[str, ServerUsage]]) -> AsyncIterator[None]:
        """Take a sample with ``look``, on a thread, every few seconds while the body runs."""
        begun = time.monotonic()

        async def look_on() -> None:
            while True:
                at = time.monotonic() - begun
                self.taken.append((at, await asyncio.to_thread(look)))
                await asyncio.sleep(_LOOK_EVERY_S)

        looking = asyncio.create_task(look_on())
        try:
            yield
        finally:
            looking.cancel()
            self.seconds = time.monotonic() - begun

    def tenth(self, part: str, number: int) -> Sequence[ServerUsage]:
        """Samples of ``part`` in one tenth, numbered from 0. Without any, the last sample of the
        run."""
        length = self.seconds / PARTS
        found = [
            look[part] for at, look in self.taken if number * length <= at < (number + 1) * length
        ]
        return found or [self.taken[-1][1][part]]

    def growth(self, part: str, name: str) -> tuple[float, float]:
        """Medians of a field of ``ServerUsage`` in the second tenth and in the last."""
        second, last = (
            median([getattr(usage, name) for usage in self.tenth(part, number)])
            for number in (1, PARTS - 1)
        )
        return second, last
