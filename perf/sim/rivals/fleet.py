"""Instances that run the jobs picked by a policy in each step, with our step costs and limits."""

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from perf.sim.arrivals import SimArrival
from perf.sim.replay.worker import WorkerSpec

_BLOCK_TOKENS = 16


@dataclass(slots=True, eq=False)
class Job:
    """One request as an engine sees it. Seconds; ``arrival.length`` is for the fleet alone."""

    arrival: SimArrival
    deadline: float
    first_by: float
    gap_s: float
    computed: int = 0
    cached: int = 0
    """Number of tokens of its prompt that the prefix cache had."""
    made: int = 0
    instance: int = -1
    """Instance that has its KV; -1 before it has begun."""
    first_at: float = 0.0
    ended_at: float = 0.0
    is_relegated: bool = False
    kept_parts: bool = True
    met: bool = False

    @property
    def arrived(self) -> float:
        return self.arrival.at_s

    @property
    def prompt_left(self) -> int:
        return self.arrival.prompt_tokens - self.computed

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV memory that the job needs for itself."""
        return self.arrival.prompt_tokens + self.arrival.max_tokens - self.cached


class _PrefixCache:
    """Cache of the blocks that one instance has computed; those used last stay."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, ids: Sequence[int]) -> int:
        """Number of tokens that need no computing; the last one always does."""
        found = 0
        for block in _blocks_of(ids[:-1]):
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            found += _BLOCK_TOKENS
        return found

    def add(self, ids: Sequence[int], room_tokens: int) -> None:
        """Keep the blocks of ``ids``, and of the others what there is room for."""
        for block in _blocks_of(ids):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) * _BLOCK_TOKENS > max(0, room_tokens):
            self._blocks.popitem(last=False)


def _blocks_of(ids: Sequence[int]) -> Iterator[int]:
    """Names of whole blocks, each after all that is up to its end."""
    name = 0
    for start in range(0, len(ids) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS):
        name = hash((name, *ids[start : start + _BLOCK_TOKENS]))
        yield name


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Figures that a policy may know of the engine: measured, in seconds."""

    slots: int
    prompt_token_s: float
    token_s: float
    """Time of a step with every slot decoding."""


class Rival(Protocol):
    """A scheduling policy. ``known_lengths`` is never set but for ceilings."""

    def pick(
        self, now: float, running: Sequence[Job], waiting: Sequence[Job], instance: int
    ) -> list[Job]:
        """The jobs of the next step on ``instance``, most wanted first.

        ``running`` are those of its last step; ``waiting`` are new ones and ones paused here.
        The fleet takes as many as have a slot and KV memory.
        """

    def stall_s(self, now: float, decodes: Sequence[Job]) -> float | None:
        """Longest time that a prompt may hold up ``decodes`` in the next step; None leaves it to
        the engine."""

    def answered(self, job: Job) -> None:
        """Learn that an answer came to its own end, or its client hung up."""


Then = Callable[[Job], SimArrival | None]
"""What the client of a job that has ended sends next, now or later; None for nothing."""


class RivalFleet:
    """Fleet that takes arrivals through a policy, step by step on virtual time."""

    def __init__(self, spec: WorkerSpec, count: int, policy: Rival, seed: int) -> None:
        self._spec = spec
        self._policy = policy
        self._rng = random.Random(seed)
        self._running: list[list[Job]] = [[] for _ in range(count)]
        self._busy = [False] * count
        self._waiting: list[Job] = []
        self._caches = [_PrefixCache() for _ in range(count)]
        self._jobs: list[Job] = []
        self._coming: list[tuple[float, int, Job]] = []
        """Jobs that have not arrived yet: a heap by time, then by number."""
        self._then: Then = _nothing

    def run(self, arrivals: Iterable[SimArrival], then: Then | None = None) -> list[Job]:
        """Run ``arrivals``, and what ``then`` says that their clients send after them; returns all
        jobs, ended. Clients hang up once what they asked for is out of reach."""
        self._then = then or _nothing
        for arrival in arrivals:
            self._expect(arrival)
        steps: list[tuple[float, int, list[Job], dict[Job, int]]] = []
        now = 0.0
        while self._coming or steps:
            if self._coming and (not steps or self._coming[0][0] <= steps[0][0]):
                now, _, job = heapq.heappop(self._coming)
                self._waiting.append(job)
            else:
                now, instance, rows, chunks = heapq.heappop(steps)
                self._busy[instance] = False
                self._step_over(now, rows, chunks)
            self._hang_up(now)
            for instance, is_busy in enumerate(self._busy):
                if is_busy:
                    continue
                rows, chunks = self._plan(now, instance)
                if rows:
                    self._busy[instance] = True
                    end = now + self._step_s(rows, chunks)
                    heapq.heappush(steps, (end, instance, rows, chunks))
        return self._jobs

    def _expect(self, arrival: SimArrival) -> None:
        job = _job(arrival)
        heapq.heappush(self._coming, (job.arrived, len(self._jobs), job))
        self._jobs.append(job)

    def _plan(self, now: float, instance: int) -> tuple[list[Job], dict[Job, int]]:
        running = [job for job in self._running[instance] if not job.ended_at]
        here = [job for job in self._waiting if job.instance in (-1, instance)]
        if not running and not here:
            self._running[instance] = []
            return [], {}
        wanted = self._policy.pick(now, running, here, instance) if here else running
        chosen: list[Job] = []
        held = {j for j in (*running, *here) if j.instance == instance}
        kv = sum(job.kv_tokens for job in held)  # the paused keep theirs
        for job in wanted:
            if len(chosen) == self._spec.slots:
                break
            if job.instance < 0:
                if kv + job.kv_tokens > self._spec.kv_tokens:
                    continue
                kv += job.kv_tokens
            chosen.append(job)
        picked = set(chosen)
        out = [job for job in running if job not in picked]
        self._waiting = [job for job in self._waiting if job not in picked] + out
        for job in chosen:
            if job.instance < 0:
                self._begin(job, instance)
        self._running[instance] = chosen
        decodes = [job for job in chosen if not job.prompt_left]
        budget = self._spec.step_tokens - len(decodes)
        if decodes:
            budget = min(budget, self._stall_tokens(now, decodes))
        chunks = {}
        for job in chosen:
            chunk = min(job.prompt_left, budget)
            if chunk > 0:
                chunks[job] = chunk
                budget -= chunk
        return chosen, chunks

    def _stall_tokens(self, now: float, decodes: Sequence[Job]) -> int:
        stall_s = self._policy.stall_s(now, decodes)
        if stall_s is None:
            stall_s = self._spec.max_stall_s
        tokens = stall_s / max(self._spec.cost.prompt_token_s, 1e-9)
        return max(16, int(min(tokens, self._spec.step_tokens)))

    def _begin(self, job: Job, instance: int) -> None:
        job.instance = instance
        if self._spec.prefix_cache:
            job.computed = job.cached = self._caches[instance].cached(job.arrival.prompt)

    def _keep(self, job: Job) -> None:
        """Keep in the prefix cache what is computed of the job's prompt, and what it has said so
        far."""
        if self._spec.prefix_cache and job.computed:
            held = (*self._running[job.instance], *self._waiting)
            kv = sum(each.kv_tokens for each in held if each.instance == job.instance)
            ids = (job.arrival.prompt + (1,) * job.made)[: job.computed + job.made]
            self._caches[job.instance].add(ids, self._spec.kv_tokens - kv)

    def _step_s(self, rows: Sequence[Job], chunks: dict[Job, int]) -> float:
        live = sum(job in chunks or not job.prompt_left for job in rows)
        step_s = self._spec.cost.of_size(live, sum(chunks.values()))
        return step_s * self._rng.lognormvariate(0.0, self._spec.noise)

    def _step_over(self, now: float, rows: Sequence[Job], chunks: dict[Job, int]) -> None:
        for job in rows:
            if job.ended_at:
                continue
            if job in chunks:
                job.computed += chunks[job]
            elif job.prompt_left:
                continue
            if job.prompt_left:
                continue
            job.made += 1
            if job.made == 1:
                self._keep(job)
                job.first_at = now
                job.kept_parts = now <= job.first_by
            elif now > _token_due(job):
                job.kept_parts = False
            if job.made >= job.arrival.length:
                self._end(job, now, met=now <= job.deadline and job.kept_parts)

    def _hang_up(self, now: float) -> None:
        for job in [*self._waiting, *(j for running in self._running for j in running)]:
            late = now > job.deadline or (not job.made and now > job.first_by)
            if late and not job.ended_at:
                self._end(job, now, met=False)

    def _end(self, job: Job, now: float, *, met: bool) -> None:
        job.ended_at, job.met = now, met
        self._keep(job)
        if job.instance < 0 or job in self._waiting:
            self._waiting.remove(job)
        self._policy.answered(job)
        following = self._then(job)
        if following is not None:
            self._expect(following)


def _nothing(job: Job) -> SimArrival | None:
    return None


def _job(arrival: SimArrival) -> Job:
    return Job(
        arrival,
        arrival.at_s + arrival.deadline_ms / 1000,
        arrival.at_s + arrival.first_token_ms / 1000,
        arrival.token_gap_ms / 1000,
    )


def _token_due(job: Job) -> float:
    """Time when the token just made had to come (token schedule as in QoServe)."""
    if job.gap_s == math.inf:
        return math.inf
    begin = job.first_by if job.first_by < math.inf else job.first_at
    return begin + (job.made - 1) * job.gap_s
