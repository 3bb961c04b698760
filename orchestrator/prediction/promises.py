"""Deadlines that the service has promised, and the time to keep them (DL-7, DL-16, DL-21).

An infeasibility refusal names the earliest deadline that will most likely be kept. A quote names
deadlines that can be reserved (``quotes``). The service holds each for a while. If a client sends
the request again with such a deadline, the request goes before all work without a promise, within a
share of the capacity.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from orchestrator.clock import Clock
from orchestrator.errors import RateLimited
from orchestrator.fair_share import is_over_share
from orchestrator.prediction.forecast import at_share
from orchestrator.prediction.forecaster import ENDS_IN_TIME, LONG, USUAL, Forecaster
from orchestrator.prediction.schedule import Prospect
from orchestrator.prediction.step_model import ERROR
from orchestrator.tasks.task import Task
from protocol import HEARTBEAT_S, Outcome

BROKEN: Final = {0.5: 0.5, 0.9: 0.05, 0.99: 0.005}
"""Share of promises that may be broken, by their stated chance: half of the stated share from 90 %
on, because clients rely on those. In the simulator's overload 0.1 kept 0.77 of 700 deadlines that
refusals named, this 0.96 of 440, which were 1.2 times as late as necessary at the median."""
PROMISED_SHARE = 0.3
"""Share of the capacity for promised work. In the simulator's overload, in which all refused
requests come again, 0.5, 0.4 and 0.3 kept 0.84, 0.88 and 0.91 of 1,500 named deadlines."""
CLAIM_S = 2.0
"""Seconds after which a deadline that a refusal named is void."""
MAX_HELD = 4096
"""Maximum number of unused reservations; tenants share them (``is_over_share``)."""
_STRETCH_STEP: Final = 0.08
"""Least learning step of a stretch. Earlier steps are longer and shrink with the root of their
number (Angelopoulos, Barber and Bates 2024): a service that has just started has the most to
learn."""
_MAX_STRETCH: Final = math.log(8.0)
RESUBMIT_MS = 20
"""Ms that a client needs, about, to send a request again: a deadline that it states as a time span
comes out at most this much later."""


class Stretch:
    """Learns a promise's factor over the predicted time, so that a stated share of promises is kept
    under any load (Gibbs and Candès 2021, eq. 2)."""

    def __init__(self, may_be_broken: float) -> None:
        """``may_be_broken``: the share (0 to 1) of promises that may be broken."""
        self.ended = 0
        """Number of promises that it has learned from."""
        self._may_be_broken = may_be_broken
        self._log = ERROR

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def learn(self, *, kept: bool) -> None:
        """Move the factor's logarithm by a step times the broken promises beyond the share."""
        self.ended += 1
        step = max(_STRETCH_STEP, 1 / math.sqrt(self.ended))
        moved = self._log + step * ((not kept) - self._may_be_broken)
        self._log = min(max(moved, -_MAX_STRETCH), _MAX_STRETCH)


@dataclass(frozen=True, slots=True)
class Reservation:
    """A deadline that is held for one request of a tenant. The request must not be larger than the
    one for which the deadline was named."""

    tenant: str
    unix_ms: int
    chance: float
    """Promised chance (0 to 1) that the deadline is kept."""
    held_until: float
    """When it becomes void if unused, in seconds of the clock."""
    work_ms: float
    model: str
    prompt_tokens: int
    max_tokens: int
    is_reserved: bool
    """Whether a client reserved it; if not, a refusal named it."""

    def fits(self, task: Task) -> bool:
        return (
            task.model == self.model
            and task.prompt_tokens <= self.prompt_tokens
            and task.sampling.max_tokens <= self.max_tokens
        )


class Promises:
    """Open promises, and the tasks that have claimed theirs."""

    def __init__(self, forecaster: Forecaster, clock: Clock) -> None:
        self.reserved: Counter[float] = Counter()
        self.ended: Counter[tuple[float, bool]] = Counter()
        """Number of used reservations that have ended, by chance and by whether they were kept."""
        self._forecaster = forecaster
        self._clock = clock
        self._held: dict[tuple[str, int], Reservation] = {}
        """Unused promises, by tenant and deadline in epoch milliseconds."""
        self._next_void = 0.0
        self._stretches: defaultdict[str, dict[float, Stretch]] = defaultdict(
            lambda: {chance: Stretch(share) for chance, share in BROKEN.items()}
        )
        """Learned factors over the predicted time, by model and promised chance."""
        self._claimed: dict[str, Task] = {}

    def put_off_ms(self, task: Task, prospect: Prospect) -> float:
        """Ms by which promised work delays ``task``, beyond its wait in the queue."""
        promised_ms = self.wait_ms(task.job.tenant, task.work_ms)
        return max(0.0, promised_ms - at_share(prospect.start_ms, USUAL))

    def earliest_ms(self, task: Task, prospect: Prospect, put_off_ms: float) -> dict[float, float]:
        """Ms from now until the earliest deadlines that can be promised to ``task``, by the chances
        of ``BROKEN``: from its place in the queue (``prospect``), delayed by ``put_off_ms``."""
        times_ms = served_ms(task, prospect)
        least_ms = self._forecaster.least_ms(task)
        found: dict[float, float] = {}
        # Levels with the most data first: an unused level must not limit the others.
        levels = self._stretches[task.model].items()
        for chance, stretch in sorted(levels, key=lambda level: -level[1].ended):
            stretched_ms = (put_off_ms + at_share(times_ms, chance)) * stretch.factor
            within_ms = max(stretched_ms, least_ms) + RESUBMIT_MS
            sooner = [ms for other, ms in found.items() if other < chance]
            later = [ms for other, ms in found.items() if other > chance]
            found[chance] = min(max(within_ms, *sooner, 0.0), *later, math.inf)
        return found

    def wait_ms(self, tenant: str = "", work_ms: float = math.inf) -> float:
        """Ms until one more promise of ``work_ms`` can be kept: after its tenant's earlier
        promises, and after each other tenant's, up to as much work as its own tenant has with this
        one. So no tenant delays another by reserving more (OR-24).

        Promises get a share of the capacity, so that they can be kept under any other load.
        """
        self._void(self._clock.now())
        promised: defaultdict[str, float] = defaultdict(float)
        for held in self._held.values():
            promised[held.tenant] += held.work_ms
        for task in self._claimed.values():
            promised[task.job.tenant] += task.work_ms
        own_ms = promised.pop(tenant, 0.0)
        before_ms = own_ms + sum(min(ms, own_ms + work_ms) for ms in promised.values())
        ready = len(self._forecaster.capacity_of("").models)
        return before_ms / (PROMISED_SHARE * max(1, ready))

    def reserve(self, task: Task, within_ms: float, chance: float, hold_s: float) -> Reservation:
        """Reserve a deadline of a task's quote for ``hold_s`` seconds. Raises ``RateLimited`` if
        the tenant holds too many."""
        now, tenant = self._clock.now(), task.job.tenant
        self._void(now)
        reserved = [one for one in self._held.values() if one.is_reserved]
        mine = [one for one in reserved if one.tenant == tenant]
        left = MAX_HELD - len(reserved)
        if left < 1 or is_over_share(len(mine), 1, left):
            first = min(one.held_until for one in mine or reserved)
            raise RateLimited(
                f"{len(reserved)} reservations are held unused, {len(mine)} of them by this "
                "tenant: use them, or hold them for less time",
                retry_after_ms=max(1.0, 1000 * (first - now)),
            )
        self.reserved[chance] += 1
        return self._hold(task, within_ms, chance, hold_s, is_reserved=True)

    def name(self, task: Task, within_ms: float) -> int:
        """Promise ``task`` a deadline for a refusal, with the chance ``LONG``. Returns the deadline
        in epoch milliseconds."""
        return self._hold(task, within_ms, LONG, CLAIM_S, is_reserved=False).unix_ms

    def _hold(
        self, task: Task, within_ms: float, chance: float, hold_s: float, *, is_reserved: bool
    ) -> Reservation:
        unix_ms = math.ceil(1000 * self._clock.unix() + within_ms)
        while (task.job.tenant, unix_ms) in self._held:
            unix_ms += 1
        promise = Reservation(
            tenant=task.job.tenant,
            unix_ms=unix_ms,
            chance=chance,
            held_until=self._clock.now() + hold_s,
            work_ms=task.work_ms,
            model=task.model,
            prompt_tokens=task.prompt_tokens,
            max_tokens=task.sampling.max_tokens,
            is_reserved=is_reserved,
        )
        self._held[promise.tenant, unix_ms] = promise
        return promise

    def claim(self, task: Task) -> None:
        """Mark ``task`` as promised if its deadline was reserved or named, once per promise."""
        now, stated = self._clock.now(), task.deadline.unix_ms
        for unix_ms in range(stated, stated - RESUBMIT_MS, -1):
            promise = self._held.get((task.job.tenant, unix_ms))
            if promise is not None and now < promise.held_until and promise.fits(task):
                del self._held[task.job.tenant, unix_ms]
                task.is_promised = True
                if promise.is_reserved:
                    task.reserved_chance = promise.chance
                self._claimed[task.id] = task
                task.on_end.append(partial(self._ended, promise))
                return

    def _ended(self, promise: Reservation, task: Task) -> None:
        self._claimed.pop(task.id, None)
        assert task.ending is not None
        # A task that never got into the queue came too late or found it full: more margin does not
        # help. A task that was cancelled or failed teaches nothing either.
        if task.marks.queued and task.ending.outcome not in (Outcome.ABORTED, Outcome.FAILED):
            kept = task.ending.outcome is Outcome.MET
            self._stretches[promise.model][promise.chance].learn(kept=kept)
            self.ended[promise.chance, kept] += promise.is_reserved

    def _void(self, now: float) -> None:
        """Forget unclaimed promises: a few times a second, as there may be many refusals."""
        if now >= self._next_void:
            self._next_void = now + HEARTBEAT_S
            self._held = {place: one for place, one in self._held.items() if now < one.held_until}


def served_ms(task: Task, prospect: Prospect) -> Sequence[float]:
    """When ``task`` is served: at its end, or at its first token if its answer always ends in
    time."""
    return prospect.first_ms if task.job.on_deadline in ENDS_IN_TIME else prospect.end_ms
