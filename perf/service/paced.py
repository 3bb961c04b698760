"""64 streams of 50 tokens/s: what calm, steady traffic costs, and how evenly it arrives.

The engine is ``synthetic-paced`` with a step of 20 ms, so every stream should hear something every
20 ms. Gaps are taken at the client, between its reads; CPU is that of the orchestrator's process,
and beside it what the kernel alone takes for so many writes (``stack.bare_writes``).
"""

from perf.load.closed_loop import ClosedLoopPlan
from perf.load.connection import HOST
from perf.load.drive import PATH, apply, completion, overhead_events, rates, us_per_token
from perf.report.bundle import Figure
from perf.stack.bare_writes import bare_writes
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec

STREAMS = 64
STEP_MS = 20.0


async def run(context: Context) -> list[Figure]:
    spec = StackSpec("synthetic-paced", device=context.device, step_ms=STEP_MS, max_running=STREAMS)
    stack = await context.stack(spec)
    assert context.card is not None
    warm_s, window_s, windows = (1.0, 1.0, 3) if context.quick else (2.0, 2.0, 7)
    # One request per stream spans the whole measurement: what it costs to begin one stays out.
    seconds = warm_s + windows * window_s + 1.0
    body = completion(context.card.model, max_tokens=round(seconds * 1000 / STEP_MS))
    plan = ClosedLoopPlan(
        host=HOST,
        port=stack.port,
        path=PATH,
        body=body,
        clients=STREAMS,
        overhead_events=await overhead_events(
            stack.port, completion(context.card.model, max_tokens=5)
        ),
        warm_s=warm_s,
        window_s=window_s,
        windows=windows,
        watch=stack.pids(),
    )
    measured = await apply(plan)
    cpu = us_per_token(measured, "orchestrator")
    of = Figure.of
    return [
        of("paced.tokens_per_s", "relayed", "tokens/s", rates(measured), better="higher"),
        of("paced.cpu_us_per_token", "orchestrator CPU", "µs/token", cpu),
        await bare_writes("paced", STREAMS, STEP_MS / 1000),
        of(
            "paced.gap_p50_ms",
            "gap between tokens, p50",
            "ms",
            [w.gap_p50_ms for w in measured.windows],
        ),
        of(
            "paced.gap_p95_ms",
            "gap between tokens, p95",
            "ms",
            [w.gap_p95_ms for w in measured.windows],
        ),
        of(
            "paced.gap_p99_ms",
            "gap between tokens, p99",
            "ms",
            [w.gap_p99_ms for w in measured.windows],
        ),
    ]


BENCH = Bench("paced", f"{STREAMS} streams of {1000 / STEP_MS:.0f} tokens/s", run, limit_s=90)
