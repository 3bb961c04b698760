"""Time to admit and dispatch a request, at 200 requests per second of a few tokens each (LB-1).

The engine is fast enough that no request waits for it. So this measures the orchestrator's own
share, from its own histograms; percentiles are interpolated within a bucket.
"""

import asyncio
import random
from collections.abc import Iterator

from perf import SEED
from perf.load.connection import HOST
from perf.load.drive import PATH, apply_open_loop, completion
from perf.load.open_loop import OpenLoopPlan, StreamRequest
from perf.load.workload import Sizes
from perf.report.bundle import Figure
from perf.report.stats import percentile
from perf.stack.context import Bench, BenchContext
from perf.stack.scrape import Scrape, scrape
from perf.stack.stack import StackSpec
from protocol import ModelCard

PER_S = 200.0
STEP_MS = 5.0
_LINGER_S = 5.0
_PROMPTS = Sizes(median=48, sigma=0.8, least=8, most=256)
_ANSWERS = Sizes(median=6, sigma=0.4, least=2, most=16)


async def run(context: BenchContext) -> list[Figure]:
    stack = await context.stack(
        StackSpec("synthetic-paced", device=context.device, step_ms=STEP_MS)
    )
    assert context.card is not None
    rounds, seconds = (3, 1.5) if context.quick else (5, 6.0)
    admission, queueing, first, together = [], [], [], []
    for turn in range(rounds + 1):
        asks = list(_asks(context.card, seconds, SEED + turn))
        before = await scrape(HOST, stack.port)
        results = await apply_open_loop(OpenLoopPlan(HOST, stack.port, PATH, asks, True, _LINGER_S))
        if not all(result.complete for result in results):
            raise RuntimeError(f"{sum(not r.complete for r in results)} requests failed")
        await asyncio.sleep(0.1)
        if not turn:  # warm-up
            continue
        counted = Scrape.between(before, await scrape(HOST, stack.port))
        admission.append(counted.quantile("tidegate_admission_ms", 0.99))
        queueing.append(counted.quantile("tidegate_queue_ms", 0.99))
        together.append(admission[-1] + queueing[-1])
        first.append(1000 * percentile([result.first_s for result in results], 50))
    of = Figure.of
    return [
        of("admission.p99_ms", "arrival to queue, p99", "ms", admission),
        of("admission.queue_p99_ms", "queue to lane, p99", "ms", queueing),
        of("admission.together_p99_ms", "admission + scheduling, sum of p99s", "ms", together),
        of("admission.ttft_p50_ms", "first token at the client, p50", "ms", first),
    ]


def _asks(card: ModelCard, seconds: float, seed: int) -> Iterator[StreamRequest]:
    """Poisson arrivals with prompts of random ids, which share no prefix, and time to spare."""
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(PER_S)) < seconds:
        length, tokens = _PROMPTS.draw(rng), _ANSWERS.draw(rng)
        prompt = [rng.randrange(16, card.vocab_size) for _ in range(length)]
        body = completion(card.model, tokens, prompt)
        yield StreamRequest(at_s, 20 * tokens * STEP_MS + 5000.0, body)


BENCH = Bench(
    "admission", f"{PER_S:.0f} requests/s of a few tokens", run, limit_s=90, in_quick=False
)
