"""Admits clips that can be in time without making others late (DL-7).

If an instance is idle, or has rendered too little recently for a prediction, a clip is admitted if
it may be in time, even if older data makes that unlikely (DL-15). In addition, a sample of refused
clips is admitted, to measure how often a refusal is wrong (DL-17).
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from clips.dispatch.fleet import ClipFleet, ClipInstance
from clips.dispatch.forecast import (
    ClipNeeds,
    Expected,
    InstanceTimeline,
    expected_on,
    forecast,
    place,
)
from clips.dispatch.task import ClipTask
from clips.dispatch.waiting import WaitingClips
from orchestrator.clock import Clock
from orchestrator.errors import DeadlineInfeasible, NotReady, QueueFull, TidegateError
from orchestrator.fair_share import is_over_share
from orchestrator.prediction.feasibility import (
    AdmissionMode,
    FeasibilityConfig,
    RefusalKind,
    RefusalStats,
)
from orchestrator.telemetry.log import fields, service_log

MOST_WAITING: Final = 100
"""Maximum number of clips that wait for an instance."""
_MAX_PLACES = 16
"""Queue positions to try for a feasible deadline before the last position."""
_RESENT_S = 0.001
"""Seconds added to a suggested deadline, which is in whole milliseconds."""


class _Hindrance(NamedTuple):
    """Why a clip is not admitted. Its ``expected`` finish is too late; or, if it ``is_others`` that
    would be late, ``expected`` is its forecast behind all of them."""

    expected: Expected
    is_others: bool


class ClipAdmission:
    """Admits clips, or raises an error with the reason."""

    def __init__(
        self,
        fleet: ClipFleet,
        waiting: WaitingClips,
        clock: Clock,
        rng: random.Random,
        config: FeasibilityConfig,
    ) -> None:
        """``rng`` draws the sample."""
        self.stats = RefusalStats[ClipTask](lambda clip: rng.random() < config.sample)
        self.refuses = config.mode is AdmissionMode.ENFORCE
        """Whether clips that are certain to be late are refused."""
        self._config = config
        self._fleet = fleet
        self._waiting = waiting
        self._clock = clock

    def admit(self, clip: ClipTask) -> None:
        """Admit ``clip``, or raise the error that refuses it; checks the cheapest reason first."""
        ready = self._fleet.ready()
        if not ready:
            raise NotReady("no instance that renders slots is ready; try again shortly")
        now = self._clock.now()
        self._waiting.time(clip)
        self._require_room(clip, ready, now)
        if self._config.mode is AdmissionMode.OFF:
            return
        why = self._infeasibility(clip, ready, now)
        self._require_feasible(clip, why)

    def hopeless(self, clip: ClipTask, now: float) -> TidegateError | None:
        """Why no instance can still finish even the minimum of a waiting clip in time. None if one
        can, or if the clip is a sample."""
        if not self.refuses or now <= clip.drop_at or clip.refusal_sample:
            return None
        if clip.loss is not None:
            return clip.loss
        lines = {one.address: InstanceTimeline(one.ability, now, ()) for one in self._fleet.seen()}
        found = place(clip.needs, lines)
        if found is None:
            return NotReady("no instance can render this any more; try again shortly")
        stats = self.stats
        is_capped = self._config.is_capped(stats.recent_share)
        if not stats.refuses(clip, RefusalKind.QUEUE, lets_in=is_capped):
            return None
        stats.refused_late()
        others = [other for other in self._waiting if other is not clip]
        return self._infeasible(clip.needs, _Hindrance(found, is_others=False), others, now)

    def tries(self, clip: ClipTask, free: list[ClipInstance], now: float) -> list[ClipInstance]:
        """The ``free`` instances to try for a clip that is unlikely to be in time anywhere."""
        expected = self._waiting.expected(clip)
        if expected is not None and expected.is_in_time:  # on an instance for which it must wait
            return []
        if clip.refusal_sample or not self.refuses:
            return free
        return [one for one in free if clip.needs.may_be_met(one.ability, now)]

    def _require_room(self, clip: ClipTask, ready: list[ClipInstance], now: float) -> None:
        own, left = 0, MOST_WAITING - len(self._waiting)
        if left > 0:
            own = sum(other.job.key == clip.job.key for other in self._waiting)
        if (left > 0 and not is_over_share(own, 1, left)) or any(one.free for one in ready):
            return
        if self.stats.is_sampled(clip, RefusalKind.QUEUE_FULL):
            self.stats.sample(clip, RefusalKind.QUEUE_FULL)
            return
        first_at = min(line.free_at for line in self._waiting.lines(now).values())
        raise QueueFull(
            f"{len(self._waiting)} slots wait already" + (f", {own} of this key" if own else ""),
            retry_after_ms=max(1000.0, 1000 * (first_at - now)),
        )

    def _require_feasible(self, clip: ClipTask, why: DeadlineInfeasible | None) -> None:
        """Raise ``why``, unless the clip is admitted as a sample of refusals (DL-17)."""
        stats = self.stats
        if why is None:
            stats.offered(refused=False)
            return
        lets_in = not self.refuses or self._config.is_capped(stats.recent_share)
        refused = stats.refuses(clip, RefusalKind.ADMISSION, lets_in=lets_in)
        stats.offered(refused=refused)
        if refused:
            raise why
        service_log.info(
            "infeasible deadline let through: %s",
            why.message,
            extra=fields(slot_id=clip.id, correlation_id=clip.job.correlation_id),
        )

    def _infeasibility(
        self, clip: ClipTask, ready: list[ClipInstance], now: float
    ) -> DeadlineInfeasible | None:
        """Why ``clip`` cannot be in time, or would make earlier clips late; otherwise None."""
        needs, others = clip.needs, list(self._waiting)
        found = self._hindrance(needs, others, self._waiting.place_of(clip), now)
        if found is None:
            return None
        if not found.is_others:
            tries = (one.ability for one in ready if one.free or not needs.is_known(one.ability))
            if any(needs.may_be_met(ability, now) for ability in tries):
                return None
        return self._infeasible(needs, found, others, now)

    def _hindrance(
        self, needs: ClipNeeds, others: Sequence[ClipTask], place_in_line: int, now: float
    ) -> _Hindrance | None:
        """The reason not to admit ``needs`` at that queue position; None if there is none."""
        before = [other.needs for other in others[:place_in_line]]
        after = [other.needs for other in others[place_in_line:]]
        found = forecast([*before, needs, *after], self._waiting.lines(now))
        own, behind = found[place_in_line], found[place_in_line + 1 :]
        assert own is not None, "some instance is ready"
        if not own.is_in_time:
            return _Hindrance(own, is_others=False)
        if all(map(_is_in_time, behind)):
            return None
        lines = self._waiting.lines(now)
        without = forecast([*before, *after], lines)[place_in_line:]
        pairs = zip(behind, without, strict=True)
        if any(_is_in_time(alone) and not _is_in_time(late) for late, alone in pairs):
            last = place(needs, lines)  # behind all others
            assert last is not None
            return _Hindrance(last, is_others=True)
        return None

    def _infeasible(
        self, needs: ClipNeeds, found: _Hindrance, others: Sequence[ClipTask], now: float
    ) -> DeadlineInfeasible:
        """The error with the reason for the refusal of ``needs``, and a feasible deadline."""
        expected = found.expected
        ability = self._fleet.instances[expected.address].ability
        work = ability.work(expected.plan)
        alone = expected_on(expected.address, needs, InstanceTimeline(ability, now, ()))
        done_ms = 1000 * (expected.done_at - now)
        why = f"it would be done after {done_ms:.0f} ms at the least"
        if found.is_others:
            why = "slots that were accepted before would be late with it, and behind them " + why
        feasible_at = self._feasible_at(needs, found, others, now)
        return DeadlineInfeasible(
            f"{1000 * max(0.0, needs.deadline_at - now):.0f} ms until the deadline are not enough:"
            f" {why}, of which {1000 * ability.buffer_s:g} ms are kept back; retry with a deadline"
            f" {math.ceil(1000 * (feasible_at - now))} ms from now",
            predicted_finish_ms=done_ms,
            earliest_feasible_unix_ms=math.ceil(1000 * (self._clock.unix() + feasible_at - now)),
            binding_constraint="queue"
            if alone.is_in_time
            else max(work, key=lambda stage: work[stage]),
        )

    def _feasible_at(
        self, needs: ClipNeeds, found: _Hindrance, others: Sequence[ClipTask], now: float
    ) -> float:
        """A deadline with which ``needs`` would be admitted now, close to the earliest such
        deadline (DL-16).

        With a later deadline, it waits behind more of ``others``, so its finish at the current
        queue position is not a valid answer.
        """
        if place(needs, self._waiting.lines(now)) is None:  # no instance is ready now
            return found.expected.done_at
        start_bys = [other.start_by for other in others if not other.refusal_sample]
        own = needs
        for _ in range(_MAX_PLACES):
            if found.is_others:
                start_by = self._waiting.start_by(own)
                behind_next = next((one for one in start_bys if one > start_by), start_by)
                own = own.by(own.deadline_at + behind_next - start_by + _RESENT_S)
            else:
                own = own.by(max(own.deadline_at, found.expected.done_at) + _RESENT_S)
            place_in_line = bisect_right(start_bys, self._waiting.start_by(own))
            hindrance = self._hindrance(own, others, place_in_line, now)
            if hindrance is None:
                return own.deadline_at
            found = hindrance
        lines = self._waiting.lines(now)
        forecast((other.needs for other in others), lines)
        last = place(needs, lines)
        assert last is not None, "some instance is ready"
        behind_s = max(start_bys, default=now) - self._waiting.start_by(needs.by(now))
        return max(last.done_at, now + behind_s) + _RESENT_S


def _is_in_time(expected: Expected | None) -> bool:
    return expected is not None and expected.is_in_time
