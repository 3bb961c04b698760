"""The benchmarks, in the order in which they run: those that share a stack stand together."""

from perf.benches import analyzer, cancel, deadline, emitter, health, paced, relay, ttft
from perf.context import Bench

BENCHES: tuple[Bench, ...] = (
    deadline.BENCH,
    emitter.BENCH,
    ttft.BENCH,
    analyzer.BENCH,
    relay.BENCH,
    health.BENCH,
    relay.SINGLE,
    paced.BENCH,
    cancel.BENCH,
)
