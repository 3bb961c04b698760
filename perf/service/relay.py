"""Throughput of tokens to 32 event-stream clients, compared with a simple server.

The engine is ``synthetic-free``, so that this measures only the path: worker process → Triton →
lane → orchestrator → 32 sockets, on the same cores as the load generator. Each token is one event,
as an OpenAI chunk; every token is accounted for. ``synthetic-free`` makes several tokens per step.
Tokens that queue up while a frame is in transit go into the next one, so a write has several
events; their number is a separate figure. ``relay-single`` uses an engine with one token per step
and stream, 10 000 steps per second, so that only queued tokens share a write. ``paced`` has 64
streams of 50 tokens/s, and measures the cost and the evenness of steady traffic.

The baseline (``stack.emitter`` with ``plain``) serves the same stream in the same run, with one
``json.dumps`` and one write per token, from tokens that cost nothing.
"""

from perf.load.closed_loop import LoadResult
from perf.load.connection import HOST
from perf.load.drive import (
    CLIENTS,
    FloodTarget,
    MeasuredWindows,
    completion,
    flood,
    in_turns,
    rates,
    ratios,
    stream,
    us_per_token,
)
from perf.report.bundle import Figure
from perf.stack.context import Bench, BenchContext
from perf.stack.scrape import scrape
from perf.stack.stack import StackSpec, emitter_server

_SINGLE_STEP_MS = 0.1


async def run(context: BenchContext) -> list[Figure]:
    stack = await context.stack(StackSpec("synthetic-free", device=context.device))
    frames = await _frames(stack.port)
    async with emitter_server("plain") as plain_server:
        assert plain_server.pid is not None
        ours, plain = await in_turns(
            FloodTarget(stack.port, stack.pids()),
            FloodTarget(plain_server.port, {"baseline": plain_server.pid}),
            quick=context.quick,
        )
    frames = await _frames(stack.port) - frames
    cpu, plain_cpu = us_per_token(ours, "orchestrator"), us_per_token(plain, "baseline")
    rate, plain_rate = rates(ours), rates(plain)
    of = Figure.of
    return [
        *_figures("relay", ours, frames),
        of("relay.baseline_tokens_per_s", "baseline", "tokens/s", plain_rate, better="higher"),
        of("relay.baseline_cpu_us_per_token", "baseline CPU", "µs/token", plain_cpu),
        of(
            "relay.cpu_ratio",
            "orchestrator CPU ÷ baseline CPU",
            "",
            ratios(cpu, plain_cpu),
            tolerance=2.5,
        ),
        of(
            "relay.rate_ratio",
            "relayed ÷ baseline rate",
            "",
            ratios(rate, plain_rate),
            better="higher",
            tolerance=2.5,
        ),
    ]


async def run_single(context: BenchContext) -> list[Figure]:
    spec = StackSpec("synthetic-paced", device=context.device, step_ms=_SINGLE_STEP_MS)
    stack = await context.stack(spec)
    frames = await _frames(stack.port)
    result = await flood(FloodTarget(stack.port, stack.pids()), MeasuredWindows(1.0, 1.5, 7))
    return _figures("relay_single", result, await _frames(stack.port) - frames)


def _figures(prefix: str, result: LoadResult, frames: float) -> list[Figure]:
    of = Figure.of
    return [
        of(f"{prefix}.tokens_per_s", "relayed", "tokens/s", rates(result), better="higher"),
        *(
            of(
                f"{prefix}.{process}_cpu_us_per_token",
                f"{process} CPU",
                "µs/token",
                us_per_token(result, process),
            )
            for process in ("orchestrator", "triton", "worker")
        ),
        of(
            f"{prefix}.events_per_write",
            "events per frame and stream",
            "",
            [result.tokens / frames / CLIENTS],
            better="neither",
        ),
    ]


async def _frames(port: int) -> float:
    """Number of frames that the orchestrator has received."""
    return (await scrape(HOST, port)).total("tidegate_lane_frames_total")


BENCH = Bench("relay", f"{CLIENTS} streaming clients, engine as fast as it goes", run, limit_s=120)
SINGLE = Bench(
    "relay-single",
    f"{CLIENTS} streaming clients, one token per step of {_SINGLE_STEP_MS} ms",
    run_single,
    limit_s=90,
    in_quick=False,
)


STREAMS = 64
STEP_MS = 20.0


async def _paced(context: BenchContext) -> list[Figure]:
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


PACED = Bench("paced", f"{STREAMS} streams of {1000 / STEP_MS:.0f} tokens/s", _paced, limit_s=90)
