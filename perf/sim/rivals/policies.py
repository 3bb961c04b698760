"""The rivals, each reimplemented from its paper or public code.

=============  =====================================================================================
``fifo``       First come, first served: vLLM's default scheduler, without preemption.
``edf``        Earliest deadline first with expiry: llm-d's flow control by TTL, Dynamo's queues.
``jitserve``   Gain over remaining work at the 0.95 quantile of the length, re-planned every few
               dozen steps, preemptive (JITServe, NSDI 2026).
``qoserve``    Deadline plus remaining prefill; what will miss is relegated once and never dropped;
               prompts in pieces as large as the slack of what decodes allows (Niyama 2025,
               QoServe, ASPLOS 2026).
``slos-serve`` The most requests whose deadlines fit, by dynamic program; the others get what is
               left (SLOs-Serve 2025, as JITServe restates it).
=============  =====================================================================================
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from perf.sim.rivals.fleet import EngineFigures, Job, Rival

REPLAN_STEPS = 32
_FIRST_GUESS_TOKENS = 64.0
_HYBRID = 1.0
"""QoServe's weight of the remaining prefill, as a multiple of its time."""


class _Lengths:
    """Lengths of answers that ended by themselves, sorted; quantiles of those longer than what is
    made."""

    def __init__(self) -> None:
        self._sorted: list[int] = []
        self.mean = _FIRST_GUESS_TOKENS

    def add(self, tokens: int) -> None:
        insort(self._sorted, tokens)
        self.mean = sum(self._sorted) / len(self._sorted)

    def left(self, made: int, share: float, most: int) -> float:
        """Tokens still to come at the quantile ``share``; at most to the stated cap."""
        above = bisect_right(self._sorted, made)
        longer = len(self._sorted) - above
        if len(self._sorted) < 20:
            return min(_FIRST_GUESS_TOKENS, max(1.0, most - made))
        if not longer:
            return max(1.0, (most - made) / 2)
        at = above + min(longer - 1, int(share * longer))
        return max(1.0, self._sorted[at] - made)

    def mean_left(self, made: int, most: int) -> float:
        above = bisect_left(self._sorted, made + 1)
        longer = self._sorted[above:]
        if len(self._sorted) < 20 or not longer:
            return self.left(made, 0.5, most)
        return max(1.0, sum(longer) / len(longer) - made)


class _Learning:
    def __init__(self, machine: EngineFigures) -> None:
        self._machine = machine
        self._lengths = _Lengths()

    def stall_s(self, now: float, decodes: Sequence[Job]) -> float | None:
        return None

    def answered(self, job: Job) -> None:
        if job.made >= job.arrival.length:
            self._lengths.add(job.made)

    def _due(self, job: Job) -> float:
        """Deadline that binds; with parts, that of the first token, then of the whole schedule."""
        if job.deadline < math.inf:
            return job.deadline
        if not job.made:
            return job.first_by
        begin = job.first_by if job.first_by < math.inf else job.first_at
        return begin + job.made * job.gap_s

    def _work_s(self, job: Job, tokens: float) -> float:
        """Seconds of work to the job's end; with parts, to the token that is due next."""
        if job.deadline == math.inf:
            tokens = 1.0
        return job.prompt_left * self._machine.prompt_token_s + tokens * self._machine.token_s


class _Replanning(_Learning):
    """Policy that looks again at what runs every 32 steps of an instance."""

    def __init__(self, machine: EngineFigures) -> None:
        super().__init__(machine)
        self._steps: dict[int, int] = {}

    def _is_due(self, instance: int) -> bool:
        steps = self._steps[instance] = self._steps.get(instance, 0) + 1
        return steps % REPLAN_STEPS == 0


class Fifo(_Learning):
    """First come, first served; what runs continues."""

    def pick(
        self, now: float, running: Sequence[Job], waiting: Sequence[Job], instance: int
    ) -> list[Job]:
        return [*running, *waiting]  # in order of arrival


class Edf(_Learning):
    """Earliest deadline first among those that wait; what runs continues."""

    def pick(
        self, now: float, running: Sequence[Job], waiting: Sequence[Job], instance: int
    ) -> list[Job]:
        return [*running, *sorted(waiting, key=self._due)]


class JitServe(_Replanning):
    """Most gain per remaining work first, over all that runs and waits, every 32 steps."""

    def pick(
        self, now: float, running: Sequence[Job], waiting: Sequence[Job], instance: int
    ) -> list[Job]:
        is_due = self._is_due(instance)
        if not is_due and len(running) >= self._machine.slots:
            return list(running)
        ranked = sorted(waiting, key=lambda job: self._key(job, now))
        if not is_due:
            return [*running, *ranked]
        return sorted([*running, *waiting], key=lambda job: self._key(job, now))

    def _key(self, job: Job, now: float) -> tuple[bool, float]:
        work_s = self._work_s(job, self._lengths.left(job.made, 0.95, job.arrival.max_tokens))
        likely_s = self._work_s(job, self._lengths.left(job.made, 0.5, job.arrival.max_tokens))
        return now + likely_s > self._due(job), work_s


class JitServeStages(JitServe):
    """JITServe's rule for requests of several stages: a call of a run is due when the share of the
    run's time is over that finished runs of its agent had used up after as many calls.

    The calls of a run have the same ``session``, those of an agent the same ``tenant``.
    """

    def __init__(self, machine: EngineFigures) -> None:
        super().__init__(machine)
        self._runs: dict[str, list[float]] = {}
        """When each run that is under way began, and when each of its calls ended."""
        self._shares: dict[tuple[str, int], tuple[float, int]] = {}
        """Sum of the shares (0 to 1) and number of runs, by agent and number of calls."""

    def answered(self, job: Job) -> None:
        super().answered(job)
        if job.arrival.session:
            self._runs.setdefault(job.arrival.session, [job.arrived]).append(job.ended_at)

    def run_over(self, agent: str, session: str) -> None:
        """Learn from a run whose last call was answered in time."""
        begun, *ends = self._runs.pop(session)
        for number, end in enumerate(ends):
            shares, runs = self._shares.get((agent, number), (0.0, 0))
            self._shares[agent, number] = shares + (end - begun) / (ends[-1] - begun), runs + 1

    def _due(self, job: Job) -> float:
        begun, *ends = self._runs.get(job.arrival.session, [job.arrived])
        shares, runs = self._shares.get((job.arrival.tenant, len(ends)), (0.0, 0))
        if not job.arrival.session or not runs:
            return super()._due(job)
        return begun + shares / runs * (job.deadline - begun)


class QoServe(_Learning):
    """Deadline plus remaining prefill; relegated once when it will miss."""

    def pick(
        self, now: float, running: Sequence[Job], waiting: Sequence[Job], instance: int
    ) -> list[Job]:
        for job in waiting:
            job.is_relegated = job.is_relegated or self._slack_s(job, now) < 0
        return [*running, *sorted(waiting, key=self._key)]

    def stall_s(self, now: float, decodes: Sequence[Job]) -> float | None:
        kept = [job for job in decodes if not job.is_relegated]
        return min((self._slack_s(job, now) for job in kept), default=math.inf)

    def _slack_s(self, job: Job, now: float) -> float:
        tokens = self._lengths.mean_left(job.made, job.arrival.max_tokens)
        return self._due(job) - now - self._work_s(job, tokens)

    def _key(self, job: Job) -> tuple[bool, float]:
        prefill_s = job.prompt_left * self._machine.prompt_token_s
        return job.is_relegated, self._due(job) + _HYBRID * self._machine.slots * prefill_s


class SlosServe(_Replanning):
    """Policy that keeps the most deadlines that fit. With equal gains the program's optimum is
    Moore and Hodgson's rule (1968): take jobs by deadline, and drop the longest whenever one does
    not fit."""

    def pick(
        self, now: float, running: Sequence[Job], waiting: Sequence[Job], instance: int
    ) -> list[Job]:
        if not self._is_due(instance) and len(running) >= self._machine.slots:
            return list(running)
        kept = self._plan(now, [*running, *waiting])
        return sorted(
            [*running, *waiting],
            key=lambda job: (job not in kept, job not in running, self._due(job)),
        )

    def _plan(self, now: float, jobs: Sequence[Job]) -> set[Job]:
        kept: list[tuple[float, int, Job]] = []  # longest first
        took_s = 0.0
        for number, job in enumerate(sorted(jobs, key=self._due)):
            tokens = self._lengths.mean_left(job.made, job.arrival.max_tokens)
            own_s = self._work_s(job, tokens)
            room_s = self._due(job) - now
            if own_s > room_s:
                continue
            share_s = own_s / self._machine.slots
            heappush(kept, (-share_s, number, job))
            took_s += share_s
            if took_s > room_s:
                took_s += heappop(kept)[0]
        return {job for *_, job in kept}


RIVALS: dict[str, tuple[str, Callable[[EngineFigures], Rival]]] = {
    "fifo": ("FIFO, clients hang up", Fifo),
    "edf": ("Earliest deadline first", Edf),
    "jitserve": ("JITServe's density", JitServe),
    "qoserve": ("QoServe's relegation", QoServe),
    "slos-serve": ("SLOs-Serve's program", SlosServe),
}
