"""Deadlines that the service has promised, and what keeping them takes (DL-7, DL-16).

A refusal as infeasible names the earliest deadline that is not, and a quote's deadline can be
reserved (``quotes``). A share of the capacity is held for a while, for a client that comes back
with that deadline.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from orchestrator.clock import Clock
from orchestrator.errors import RateLimited
from orchestrator.fair_share import is_over_share
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.tasks.task import Task
from protocol import Outcome

PROMISED_SHARE = 0.3
"""Share of the capacity that promises are made of. In the simulator's overload, where all who are
refused come again, 0.5, 0.4 and 0.3 kept 0.84, 0.88 and 0.91 of 1,500 named deadlines."""
CLAIM_S = 2.0
"""Seconds after which a promise that nobody came back for is void."""
MAX_HELD = 4096
"""Most reservations that are held unused at once; tenants share them (``is_over_share``)."""
FIRST_STRETCH, _STRETCH_STEP = 0.25, 0.2
"""In the simulator's overload 0.15 and 0.08 kept 0.69 of 233 named deadlines, these more than 0.9
(``tests/perf/test_sim_reported.py``)."""
_MAX_STRETCH = math.log(8.0)
_MAY_BE_LOST = 0.06
"""Share of the deadlines named by refusals that may be lost, a little less than a tenth (DL-16)."""
RESUBMIT_MS = 20
"""Ms that a client needs, about, to ask again: a deadline that it states as a time span comes out
later by no more."""
_LOST = (Outcome.MISSED, Outcome.PARTIAL, Outcome.REFUSED)

Learn = Callable[[bool], None]
"""Called at the end of a promised task with whether the promise was kept; not where the task was
cancelled, or failed."""


class Stretch:
    """Learns how much longer than predicted a promise allows, so that a stated share of promises is
    kept whatever the load does (Gibbs and Candès 2021, eq. 2)."""

    def __init__(self, may_be_lost: float, first: float) -> None:
        """``may_be_lost`` is a share of promises, ``first`` the logarithm of the first factor."""
        self._may_be_lost = may_be_lost
        self._log = first

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def learn(self, step: float, *, kept: bool) -> None:
        """Move the factor's logarithm by ``step`` times what was lost beyond the share."""
        moved = self._log + step * ((not kept) - self._may_be_lost)
        self._log = min(max(moved, -_MAX_STRETCH), _MAX_STRETCH)


class _Promise(NamedTuple):
    tenant: str
    work_ms: float
    made_at: float


@dataclass(frozen=True, slots=True)
class Reservation:
    """A deadline that is held for one request of a tenant, which is no larger than the quoted
    one."""

    tenant: str
    unix_ms: int
    chance: float
    """Chance (0 to 1) with which the reservation is to be met."""
    held_until: float
    """When it is void unless it was used, in seconds of the clock."""
    work_ms: float
    model: str
    prompt_tokens: int
    max_tokens: int
    learn: Learn

    def fits(self, task: Task) -> bool:
        return (
            task.model == self.model
            and task.prompt_tokens <= self.prompt_tokens
            and task.sampling.max_tokens <= self.max_tokens
        )


class Promises:
    """Open promises, and the tasks that came back for theirs."""

    def __init__(self, forecaster: Forecaster, clock: Clock) -> None:
        self._forecaster = forecaster
        self._clock = clock
        self._open: OrderedDict[int, _Promise] = OrderedDict()
        """Open promises, by the deadline that was named, in epoch milliseconds."""
        self._held: dict[tuple[str, int], Reservation] = {}
        """Unused reservations, by tenant and deadline in epoch milliseconds."""
        self._next_void = math.inf
        self._stretch = defaultdict[str, Stretch](lambda: Stretch(_MAY_BE_LOST, FIRST_STRETCH))
        """How much later named deadlines are than predicted, by model."""
        self._claimed: dict[str, Task] = {}

    def stretch(self, model: str) -> float:
        """Factor by which the next deadline that is named is later than predicted."""
        return self._stretch[model].factor

    def _learn(self, model: str, kept: bool) -> None:
        self._stretch[model].learn(_STRETCH_STEP, kept=kept)

    def wait_ms(self, tenant: str = "", work_ms: float = math.inf) -> float:
        """Ms until one more promise of that much work can be kept: after all earlier ones of its
        tenant, and of each other tenant at most as much as it has itself with this, so that none
        makes another wait by reserving more (OR-24).

        Promises get a share of the capacity, so that they can be kept whatever else comes.
        """
        now = self._clock.now()
        while self._open:
            unix_ms, promise = next(iter(self._open.items()))
            if now < promise.made_at + CLAIM_S:
                break
            del self._open[unix_ms]
        self._void(now)
        promised: defaultdict[str, float] = defaultdict(float)
        for one in self._open.values():
            promised[one.tenant] += one.work_ms
        for held in self._held.values():
            promised[held.tenant] += held.work_ms
        for task in self._claimed.values():
            promised[task.job.tenant] += task.work_ms
        own_ms = promised.pop(tenant, 0.0)
        before_ms = own_ms + sum(min(ms, own_ms + work_ms) for ms in promised.values())
        ready = len(self._forecaster.capacity_of("").models)
        return before_ms / (PROMISED_SHARE * max(1, ready))

    def make(self, deadline_unix_ms: int, task: Task) -> None:
        self._open[deadline_unix_ms] = _Promise(task.job.tenant, task.work_ms, self._clock.now())

    def reserve(
        self, task: Task, unix_ms: int, chance: float, hold_s: float, learn: Learn
    ) -> Reservation:
        """Hold what ``task`` needs by about that deadline for its tenant. Raises ``RateLimited``
        where the tenant holds too many."""
        now, tenant = self._clock.now(), task.job.tenant
        self._void(now)
        mine = [one for one in self._held.values() if one.tenant == tenant]
        left = MAX_HELD - len(self._held)
        if left < 1 or is_over_share(len(mine), 1, left):
            first = min(one.held_until for one in mine or self._held.values())
            raise RateLimited(
                f"{len(self._held)} reservations are held unused, {len(mine)} of them by this "
                "tenant: use them, or hold them for less time",
                retry_after_ms=max(1.0, 1000 * (first - now)),
            )
        while (tenant, unix_ms) in self._held:
            unix_ms += 1
        reservation = Reservation(
            tenant=tenant,
            unix_ms=unix_ms,
            chance=chance,
            held_until=now + hold_s,
            work_ms=task.work_ms,
            model=task.model,
            prompt_tokens=task.prompt_tokens,
            max_tokens=task.sampling.max_tokens,
            learn=learn,
        )
        self._held[tenant, unix_ms] = reservation
        self._next_void = min(self._next_void, reservation.held_until)
        return reservation

    def claim(self, task: Task) -> None:
        """Promise ``task`` if its deadline was reserved or named, once for each of these."""
        stated = task.deadline.unix_ms
        place = task.job.tenant, stated
        self._void(self._clock.now())
        reservation = self._held.get(place)
        if reservation is not None and reservation.fits(task):
            del self._held[place]
            task.reserved_chance = reservation.chance
            self._mark(task, reservation.learn)
            return
        for unix_ms in range(stated, stated - RESUBMIT_MS, -1):
            if self._open.pop(unix_ms, None) is not None:
                self._mark(task, partial(self._learn, task.model))
                return

    def _mark(self, task: Task, learn: Learn) -> None:
        task.is_promised = True
        self._claimed[task.id] = task
        task.on_end.append(lambda ended: self._ended(ended, learn))

    def _ended(self, task: Task, learn: Learn) -> None:
        self._claimed.pop(task.id, None)
        assert task.ending is not None
        outcome = task.ending.outcome
        # A task that never got into the queue came too late, or found it full: no safety cures
        # that.
        if task.marks.queued and (outcome is Outcome.MET or outcome in _LOST):
            learn(outcome is Outcome.MET)

    def _void(self, now: float) -> None:
        """Forget reservations that nobody came for."""
        if now < self._next_void:
            return
        self._held = {place: one for place, one in self._held.items() if now < one.held_until}
        self._next_void = min((one.held_until for one in self._held.values()), default=math.inf)
