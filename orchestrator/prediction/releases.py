"""Computes when the n-th place falls free, from distributions of how long places are taken."""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

_FEW = 4
"""How many of the likely times of each job that has yet to start are used."""


def start_ms(
    running: Iterable[Sequence[float]], ahead: Sequence[Sequence[float]], free: int
) -> float:
    """When work behind ``ahead`` will start, in ms from now: the middle of its likely times.

    Each of ``running`` and ``ahead`` is a list of equally likely times for which one job has its
    place. ``free`` places are free now; negative if more has been sent than runs at once.

    The n-th place is free when n − ½ are to be expected: the jobs' distributions are added up, and
    with one job alone that is its median. 0 if nothing runs.
    """
    releases = [(ms, 1 / len(times)) for times in running for ms in times]
    heapify(releases)
    now_ms, wanted, expected = 0.0, 0.5 - free, 0.0
    for times in (*ahead, ()):
        while expected < wanted and releases:
            now_ms, share = heappop(releases)
            expected += share
        if not times:
            break
        wanted += 1
        few = times[len(times) // (2 * _FEW) :: max(1, len(times) // _FEW)]
        for ms in few:
            heappush(releases, (now_ms + ms, 1 / len(few)))
    return now_ms
