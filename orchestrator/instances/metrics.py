"""Breakers and second tries, for whoever scrapes."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from orchestrator.dispatch.hedge import HedgeStats
from orchestrator.dispatch.retry import Retrier, RetryDenied
from orchestrator.instances.breaker import BreakerState
from orchestrator.instances.registry import Registry


class FleetCollector(Collector):
    """Reads what is counted anyway, when asked."""

    def __init__(self, registry: Registry, retrier: Retrier, hedges: HedgeStats) -> None:
        self._hedges = hedges
        self._registry = registry
        self._retrier = retrier

    def collect(self) -> Iterable[Metric]:
        breakers = self._registry.breakers
        state = GaugeMetricFamily(
            "tidegate_breaker_state",
            "1 for the state that an instance's breaker is in",
            labels=["instance", "state"],
        )
        opened = CounterMetricFamily(
            "tidegate_ejections",
            "How often an instance's breaker opened (DL-11)",
            labels=["instance"],
        )
        load = GaugeMetricFamily(
            "tidegate_model_load_ms",
            "How long the instance's model took to load (LB-6)",
            labels=["instance", "model"],
        )
        for instance in self._registry:
            if instance.card is not None and instance.stats is not None:
                load.add_metric([instance.address, instance.card.model], instance.stats.load_ms)
            now = breakers.state(instance.address)
            for possible in BreakerState:
                state.add_metric([instance.address, possible.value], float(possible is now))
            opened.add_metric([instance.address], breakers.ejections[instance.address])
        yield load
        yield state
        yield opened
        again = CounterMetricFamily(
            "tidegate_retries", "Jobs sent again, by what for (OR-10)", labels=["kind"]
        )
        for kind in ("retry", "continue"):
            again.add_metric([kind], self._retrier.granted[kind])
        yield again
        denied = CounterMetricFamily(
            "tidegate_retries_denied", "Jobs not sent again, by why (OR-10, DL-12)", labels=["why"]
        )
        for why in RetryDenied:
            denied.add_metric([why.value], self._retrier.denied[why])
        yield denied
        hedges = CounterMetricFamily(
            "tidegate_hedges", "Rivals sent, and of these won and lost (OR-10)", labels=["what"]
        )
        for what, count in (
            ("begun", self._hedges.begun),
            ("won", self._hedges.won),
            ("lost", self._hedges.lost),
        ):
            hedges.add_metric([what], count)
        yield hedges
        yield CounterMetricFamily(
            "tidegate_hedge_aborts_verified",
            "Losers of races whose worker has said that they are gone",
            self._hedges.aborts_verified,
        )
