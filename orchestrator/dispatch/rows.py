"""Sets the number of rows that each instance runs at once: its batch size.

More rows make more tokens per second, but each row is slower. The schedule
(``prediction.schedule``) is simulated with several numbers of rows, and the largest number that
meets about the most requests is chosen. While all requests can be met, that is all rows.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from orchestrator.clock import Clock
from orchestrator.dispatch.attempt import AttemptsInFlight
from orchestrator.dispatch.replan import PAUSE_S
from orchestrator.instances.concurrency import UNBOUNDED
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.prediction.prediction import Prediction
from orchestrator.prediction.schedule import ROWS_EVERY_S, row_counts
from orchestrator.telemetry.log import service_log

ALL_MET: Final = 0.95
"""Share of met requests that counts as all. In the simulator's conversations of agents, 1 - 0.35/√n
of n requests in its place met 0.95 times as many."""
FEW: Final = 2.0
"""Number of requests that counts as noise: the largest number of rows that meets all but this many
of the most is chosen, fewer than now only if they meet over twice this many more. The forecast does
not see requests that arrive next, and these lose by fewer rows. In the simulator agents met 0.931,
with a noise of 0.35/√n 0.911; crowds 441 and 434; loads, bursts, flood and traces within 0.007."""


class RowControl:
    """Limits the rows of instances, based on running and waiting requests."""

    def __init__(
        self,
        registry: Registry,
        prediction: Prediction,
        in_flight: AttemptsInFlight,
        clock: Clock,
        *,
        enabled: bool,
    ) -> None:
        """If not ``enabled``, all slots are used."""
        self._registry = registry
        self._schedule = prediction.schedule
        self._in_flight = in_flight
        self._clock = clock
        self._enabled = enabled
        self._is_due = False
        self._is_bound = False
        """Whether the rows of an instance are limited for urgent work."""

    def adapts(self, model: str) -> bool:
        """Whether every instance of ``model`` can run fewer rows."""
        of_model = [each for each in self._registry if each.card and each.card.model == model]
        return self._enabled and all(each.can_pause and not each.foreign_load for each in of_model)

    def wake(self, changed: Callable[[], None]) -> None:
        """Decide soon, and then regularly while jobs run; ``changed`` is called when a decision
        changes rows. Idempotent."""
        if self._enabled and not self._is_due:
            self._is_due = True
            self._clock.call_at(self._clock.now() + ROWS_EVERY_S, lambda: self._decide(changed))

    def _decide(self, changed: Callable[[], None], deciding: Iterator[bool] | None = None) -> None:
        """Simulate the schedule once; the next one follows a pause, so no stream is delayed."""
        deciding = self._deciding() if deciding is None else deciding
        try:
            for is_changed in deciding:
                if is_changed:
                    changed()
                at = self._clock.now() + PAUSE_S
                self._clock.call_at(at, lambda: self._decide(changed, deciding))
                return
        except Exception:
            service_log.exception("choosing the number of rows failed; will retry")
        self._is_due = False
        if len(self._in_flight):
            self.wake(changed)
        elif self._is_bound:  # by work that has ended
            for instance in self._registry:
                instance.concurrency.best_rows = UNBOUNDED

    def _deciding(self) -> Iterator[bool]:
        """Set the rows of all instances; yields after each simulation whether rows have changed."""
        serving: defaultdict[str, list[Instance]] = defaultdict(list)
        for instance in self._registry:
            if instance.ready and instance.card:
                serving[instance.card.model].append(instance)
        is_bound = False
        for model, instances in serving.items():
            learners = [each.step_learner for each in instances if each.step_learner is not None]
            most = max((learner.model.slots for learner in learners), default=1)
            foreign = sum(instance.foreign_load for instance in instances)
            requests = self._schedule.count(model)
            current = min(most, instances[0].concurrency.best_rows)
            worse, met = 1 - 2 * _noise(requests), dict[int, float]()
            counts = row_counts(most)[::-1]
            shares = self._schedule.met_with(model, counts, foreign)
            for count, share in zip(counts, shares, strict=False):
                met[count] = share
                last_two = list(met.values())[-2:]
                if met[most] >= ALL_MET or max(last_two) < worse * max(met.values()):
                    break  # fewer rows meet no more requests
                yield False
            chosen = best_rows(met, current, requests) if met else most
            best = UNBOUNDED if chosen == most else chosen
            bounds, is_changed = self._schedule.most_rows(model), False
            is_bound = is_bound or bool(bounds)
            for instance in instances:
                # No more rows than urgent work was admitted with.
                bound = min(bounds.get("", best), bounds.get(instance.address, best))
                is_changed |= instance.concurrency.best_rows != (own := int(min(best, bound)))
                instance.concurrency.best_rows = own
            self._is_bound = is_bound
            yield is_changed


def best_rows(met: Mapping[int, float], current: int, requests: int) -> int:
    """The largest number of rows that meets about the most of ``requests`` requests (shares by
    number of rows in ``met``); fewer than ``current`` only if that is clearly better."""
    best, noise = max(met.values()), _noise(requests)
    chosen = max(rows for rows, share in met.items() if share >= (1 - noise) * best)
    now = met[min(met, key=lambda rows: abs(rows - current))]
    return chosen if chosen >= current or now < (1 - 2 * noise) * best else current


def _noise(requests: int) -> float:
    return min(0.5, FEW / max(1, requests))
