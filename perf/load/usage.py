"""Memory, files and threads that a server uses, with all of its processes."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from perf.load.cpu import process_cpu_s
from pool.process.process import children_of

_MIB = 2**20
_SHM = "/dev/shm/"
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of some processes, added up. Pages that they share count for each."""

    rss_mib: float
    shm_mib: float
    """MiB of mapped files in ``/dev/shm``, each counted once."""
    fds: int
    threads: int
    processes: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Usage now of ``pid`` and all processes below it. Processes that end meanwhile are left
        out."""
        return cls.of_each(tree(pid))

    @classmethod
    def of_each(cls, pids: Iterable[int]) -> Self:
        """Usage now of ``pids``, without the processes below them."""
        pages = fds = threads = processes = 0
        mapped: dict[tuple[int, int], int] = {}
        for each in pids:
            with suppress(*_GONE):
                proc = Path(f"/proc/{each}")
                pages += int((proc / "statm").read_text().split()[1])
                fds += len(os.listdir(proc / "fd"))
                threads += len(os.listdir(proc / "task"))
                mapped |= _mapped(proc)
                processes += 1
        return cls(
            rss_mib=pages * os.sysconf("SC_PAGE_SIZE") / _MIB,
            shm_mib=sum(mapped.values()) / _MIB,
            fds=fds,
            threads=threads,
            processes=processes,
        )


def tree(pid: int) -> Iterator[int]:
    """``pid`` and every process below it."""
    yield pid
    for child in children_of(pid):
        yield from tree(child)


def cpu_s(pid: int) -> float:
    """Seconds of CPU that ``pid`` and every process below it have used; those that ended do not
    count any more."""
    total = 0.0
    for each in tree(pid):
        with suppress(ProcessLookupError):
            total += process_cpu_s(each)
    return total


def _mapped(proc: Path) -> dict[tuple[int, int], int]:
    """Bytes really taken by each file in ``/dev/shm`` that the process maps."""
    found: dict[tuple[int, int], int] = {}
    for line in (proc / "maps").read_text().splitlines():
        at = line.find(_SHM)
        if at >= 0:
            with suppress(OSError):
                stat = os.stat(line[at:])
                found[stat.st_dev, stat.st_ino] = 512 * stat.st_blocks
    return found
