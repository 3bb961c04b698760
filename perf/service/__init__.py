"""The benchmarks, in the order in which they run: those that share a stack stand together."""

from perf.service import (
    admission,
    analyzer,
    burst,
    cancel,
    deadline,
    emitter,
    health,
    journal,
    paced,
    parsing,
    placement,
    queued,
    relay,
    schedule,
    step,
    streams,
    ttft,
)
from perf.stack.context import Bench

BENCHES: tuple[Bench, ...] = (
    deadline.BENCH,
    placement.BENCH,
    schedule.BENCH,
    emitter.BENCH,
    parsing.BENCH,
    step.BENCH,
    ttft.BENCH,
    analyzer.BENCH,
    relay.BENCH,
    health.BENCH,
    relay.SINGLE,
    paced.BENCH,
    step.TRITON,
    cancel.BENCH,
    streams.BENCH,
    burst.BENCH,
    queued.BENCH,
    admission.BENCH,
    journal.BENCH,
)
