"""Benchmarks in the order in which they run: those that share a stack stand together."""

from perf.service import (
    admission,
    cancel,
    deadline,
    emitter,
    health,
    paced,
    promises,
    relay,
    starts,
    ttft,
)
from perf.stack.context import Bench

BENCHES: tuple[Bench, ...] = (
    deadline.BENCH,
    emitter.BENCH,
    ttft.BENCH,
    relay.BENCH,
    health.BENCH,
    relay.SINGLE,
    paced.BENCH,
    promises.OVERTAKING,
    promises.FLOOD,
    cancel.BENCH,
    admission.BENCH,
    starts.BENCH,
)
