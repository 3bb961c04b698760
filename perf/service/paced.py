"""64 streams of 50 tokens/s: what calm, steady traffic costs, and how evenly it arrives.

The engine is ``synthetic-paced`` with a step of 20 ms, so every stream should hear something every
20 ms. Gaps are taken at the client, between its reads; CPU is that of the orchestrator's process.
"""

from perf.load.drive import MeasuredWindows, completion, rates, stream, us_per_token
from perf.report.bundle import Figure
from perf.stack.context import Bench, BenchContext
from perf.stack.stack import StackSpec

STREAMS = 64
STEP_MS = 20.0


async def run(context: BenchContext) -> list[Figure]:
    spec = StackSpec("synthetic-paced", device=context.device, step_ms=STEP_MS, max_running=STREAMS)
    stack = await context.stack(spec)
    assert context.card is not None
    windows = MeasuredWindows(1.0, 1.0, 3) if context.quick else MeasuredWindows(2.0, 2.0, 7)
    body = completion(context.card.model, windows.tokens(STEP_MS))
    measured = await stream(stack.port, body, STREAMS, windows, watch=stack.pids())
    cpu = us_per_token(measured, "orchestrator")
    of = Figure.of
    gaps_ms = {
        50: [window.gap_p50_ms for window in measured.windows],
        95: [window.gap_p95_ms for window in measured.windows],
        99: [window.gap_p99_ms for window in measured.windows],
    }
    return [
        of("paced.tokens_per_s", "relayed", "tokens/s", rates(measured), better="higher"),
        of("paced.cpu_us_per_token", "orchestrator CPU", "µs/token", cpu),
        *(
            of(f"paced.gap_p{percent}_ms", f"gap between tokens, p{percent}", "ms", by_window)
            for percent, by_window in gaps_ms.items()
        ),
    ]


BENCH = Bench("paced", f"{STREAMS} streams of {1000 / STEP_MS:.0f} tokens/s", run, limit_s=90)
