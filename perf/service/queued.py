"""1,000 queued requests beside 8 running streams: the streams should not notice.

The engine has 8 slots, which the streams hold all the time. Half-way a thousand tasks are
submitted; they wait. Gaps between tokens are taken before and while they do.
"""

import asyncio

from perf.load.connection import HOST, HttpConnection
from perf.load.drive import Windows, completion, stream
from perf.report.bundle import Figure
from perf.report.stats import median
from perf.stack.context import Bench, Context
from perf.stack.scrape import scrape, until_running
from perf.stack.stack import StackSpec

STREAMS = 8
QUEUED = 1000
STEP_MS = 20.0
_SUBMITTERS = 4
_PATIENT_MS = 1_700_000.0


async def run(context: Context) -> list[Figure]:
    spec = StackSpec(
        "synthetic-paced",
        device=context.device,
        step_ms=STEP_MS,
        max_running=STREAMS,
        queue_size=-1,
    )
    stack = await context.stack(spec)
    assert context.card is not None
    model, window_s = context.card.model, 1.0
    quiet, submitting, busy = (3, 3, 3) if context.quick else (8, 4, 8)
    windows = Windows(1.0, window_s, quiet + submitting + busy)
    body = completion(model, windows.tokens(STEP_MS))
    running = asyncio.create_task(stream(stack.port, body, STREAMS, windows))
    try:
        await until_running(stack.port, STREAMS)
        await asyncio.sleep(windows.warm_s + quiet * window_s)
        ids = await _submit_all(stack.port, model)
        waiting = (await scrape(HOST, stack.port)).total("tidegate_queue_depth")
        measured = await running
    finally:
        running.cancel()
    await _cancel_all(stack.port, ids)
    if waiting < 0.9 * QUEUED:
        raise RuntimeError(f"{waiting:.0f} tasks waited, not {QUEUED}")
    before, after = measured.windows[:quiet], measured.windows[-busy:]
    of, p99 = Figure.of, [w.gap_p99_ms for w in before]
    return [
        of("queued.gap_p99_quiet_ms", "gap between tokens, p99, empty queue", "ms", p99),
        of(
            "queued.gap_p99_ms",
            f"the same with {QUEUED} queued",
            "ms",
            [w.gap_p99_ms for w in after],
        ),
        of(
            "queued.gap_p50_ratio",
            f"{QUEUED} queued ÷ empty, gap p50",
            "",
            [w.gap_p50_ms / median([w.gap_p50_ms for w in before]) for w in after],
            tolerance=1.5,
        ),
    ]


async def _submit_all(port: int, model: str) -> list[str]:
    body = {"model": model, "prompt": "x", "max_tokens": 1, "deadline_ms": _PATIENT_MS}

    async def some(count: int) -> list[str]:
        ids = []
        async with HttpConnection(HOST, port) as http:
            for _ in range(count):
                http.send("POST", "/v2/tasks", body)
                _, answer = await http.answer()
                ids.append(answer.partition(b'"task_id":"')[2].partition(b'"')[0].decode())
        return ids

    parts = await asyncio.gather(*(some(QUEUED // _SUBMITTERS) for _ in range(_SUBMITTERS)))
    return [task_id for part in parts for task_id in part]


async def _cancel_all(port: int, ids: list[str]) -> None:
    async with HttpConnection(HOST, port) as http:
        for task_id in ids:
            http.send("DELETE", f"/v2/tasks/{task_id}")
            await http.answer()


BENCH = Bench(
    "queued", f"{STREAMS} streams beside {QUEUED} queued requests", run, limit_s=90, in_quick=False
)
