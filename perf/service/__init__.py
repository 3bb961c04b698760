"""Benchmarks in the order in which they run: those that share a stack stand together."""

from perf.service import (
    admission,
    burst,
    cancel,
    deadline,
    emitter,
    health,
    journal,
    kinds,
    paced,
    parsing,
    placement,
    promises,
    queued,
    relay,
    step,
    ttft,
)
from perf.stack.context import Bench

BENCHES: tuple[Bench, ...] = (
    deadline.BENCH,
    placement.BENCH,
    emitter.BENCH,
    parsing.BENCH,
    step.BENCH,
    ttft.BENCH,
    relay.BENCH,
    health.BENCH,
    relay.SINGLE,
    paced.BENCH,
    promises.OVERTAKING,
    promises.FLOOD,
    step.TRITON,
    cancel.BENCH,
    kinds.BENCH,
    burst.BENCH,
    queued.BENCH,
    admission.BENCH,
    journal.BENCH,
)
