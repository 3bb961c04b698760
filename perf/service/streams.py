"""From 8 to 256 streams of 50 tokens/s: the orchestrator's CPU per token should not grow.

More streams mean more tokens per frame, so a token gets cheaper if anything; what must not appear
is a cost per token that grows with the number of streams.
"""

from perf.load.closed_loop import ClosedLoopPlan
from perf.load.connection import HOST
from perf.load.drive import PATH, apply, completion, overhead_events, us_per_token
from perf.report.bundle import Figure
from perf.report.stats import median
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec

COUNTS = (8, 32, 128, 256)
STEP_MS = 20.0


async def run(context: Context) -> list[Figure]:
    spec = StackSpec(
        "synthetic-paced", device=context.device, step_ms=STEP_MS, max_running=max(COUNTS)
    )
    stack = await context.stack(spec)
    assert context.card is not None
    warm_s, window_s, windows = (0.7, 0.7, 3) if context.quick else (1.5, 1.5, 5)
    seconds = warm_s + windows * window_s + 1.0
    body = completion(context.card.model, max_tokens=round(seconds * 1000 / STEP_MS))
    extra = await overhead_events(stack.port, completion(context.card.model, max_tokens=5))
    costs = {}
    for count in (COUNTS[0], COUNTS[-1]) if context.quick else COUNTS:
        measured = await apply(
            ClosedLoopPlan(
                host=HOST,
                port=stack.port,
                path=PATH,
                body=body,
                clients=count,
                overhead_events=extra,
                warm_s=warm_s,
                window_s=window_s,
                windows=windows,
                watch=stack.pids(),
            )
        )
        costs[count] = us_per_token(measured, "orchestrator")
    few, many = median(costs[COUNTS[0]]), costs[COUNTS[-1]]
    figures = [
        Figure.of(
            f"streams.cpu_us_per_token_{count}",
            f"orchestrator CPU, {count} streams",
            "µs/token",
            us,
        )
        for count, us in costs.items()
    ]
    label = f"{COUNTS[-1]} streams ÷ {COUNTS[0]}, CPU per token"
    figures.append(Figure.of("streams.ratio", label, "", [us / few for us in many], tolerance=2.0))
    return figures


BENCH = Bench("streams", "CPU per token by number of streams", run, limit_s=90, in_quick=False)
