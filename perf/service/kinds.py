"""Cost of each kind of instance for the orchestrator, and how soon it hears of a job given up.

Relay: 32 streams of 50 tokens/s through an orchestrator of its own for each kind, one after the
other in one run; CPU is the orchestrator's, its polling included. A Triton with the paced synthetic
engine stands behind Tidegate's lane and behind the plain contract; behind the others a mock of
their servers (``stack.other_servers``), so that the path is what is measured.

Given up: a client closes its socket. Over a Triton it is timed until the worker's slot has its next
tenant (``service.cancel``), over the mocks until the server has noticed: what their engines take
beyond that is theirs, and no part of this.
"""

import asyncio
import random
import time

import msgspec

from catalog.paths import DEMO_CHECKPOINT
from perf import SEED
from perf.load.connection import HOST, HttpConnection
from perf.load.drive import Windows, completion, stream, us_per_token
from perf.load.lane import open_lane
from perf.report.bundle import Figure
from perf.service.cancel import freed_ms, running_stream
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec, orchestrating, server

STREAMS = 32
STEP_MS = 20.0
_HTTP = {"vllm": "vLLM's server", "llamacpp": "llama.cpp's server", "tgi": "TGI"}
_WARM_UP = 2


async def run(context: Context) -> list[Figure]:
    spec = StackSpec("synthetic-paced", device=context.device, step_ms=STEP_MS, max_running=STREAMS)
    stack = await context.stack(spec)
    figures = await _relay(context, "tidegate", "Tidegate's lane", stack.port, stack.pids())
    query = f"tokenizer={DEMO_CHECKPOINT}&alias=demo"
    # What an abort is said to take must not keep the next sample waiting.
    plain = f"triton+grpc://{stack.grpc_address}/llm?{query}&slots=64&abort_ms=0"
    async with orchestrating([plain], {}, "kinds-triton") as through:
        assert through.pid is not None
        pids = {"orchestrator": through.pid}
        figures += await _relay(context, "triton", "plain contract", through.port, pids)
    async with server("perf.stack.other_servers", str(STEP_MS)) as others:
        for kind, label in _HTTP.items():
            entry = f"{kind}+http://{HOST}:{others.port}?{query}&slots=64&abort_ms=0"
            async with orchestrating([entry], {}, f"kinds-{kind}") as through:
                assert through.pid is not None
                pids = {"orchestrator": through.pid}
                figures += await _relay(context, kind, label, through.port, pids)
                figures.append(await _noticed(context, kind, label, through.port, others.port))
    figures += await _freed(context)
    return figures


async def _relay(
    context: Context, kind: str, label: str, port: int, watch: dict[str, int]
) -> list[Figure]:
    windows = Windows(0.5, 1.0, 3) if context.quick else Windows(1.0, 1.5, 7)
    # TGI has no such thing, and its mock no end token.
    body = completion("demo", windows.tokens(STEP_MS)) | {"ignore_eos": kind != "tgi"}
    cpu = us_per_token(await stream(port, body, STREAMS, windows, watch=watch), "orchestrator")
    return [Figure.of(f"kinds.{kind}.cpu_us_per_token", f"{label}: CPU", "µs/token", cpu)]


async def _noticed(context: Context, kind: str, label: str, port: int, server_port: int) -> Figure:
    """Time from a client's closing its socket until the server notices."""
    draw = random.Random(SEED)
    took: list[float] = []
    async with HttpConnection(HOST, server_port) as asking:
        for _ in range(_WARM_UP + (10 if context.quick else 40)):
            before = len(await _stops(asking))
            async with running_stream(port, "demo", ignores_eos=kind != "tgi") as act:
                await asyncio.sleep(draw.uniform(0.01, 0.03))
                acted_at = time.monotonic()
                await act()
            stops: list[float] = []
            while len(stops) <= before:
                await asyncio.sleep(0.05)  # the server itself says when it was
                stops = await _stops(asking)
            took.append(1000 * (stops[before] - acted_at))
    name = f"kinds.{kind}.noticed_ms"
    what = f"{label}: client gone until the server knows"
    return Figure.of(name, what, "ms", took[_WARM_UP:], spread="p5–p95")


async def _stops(asking: HttpConnection) -> list[float]:
    asking.send("GET", "/stops")
    _, body = await asking.answer()
    return msgspec.json.decode(body, type=list[float])


async def _freed(context: Context) -> list[Figure]:
    """Time from a client's closing its socket to the slot's next tenant, on a worker with one
    slot."""
    spec = StackSpec("synthetic-paced", device=context.device, step_ms=STEP_MS, max_running=1)
    stack = await context.stack(spec)
    query = f"tokenizer={DEMO_CHECKPOINT}&alias=demo&slots=4&abort_ms=0"
    figures = []
    plain = f"triton+grpc://{stack.grpc_address}/llm?{query}"
    async with (
        orchestrating([plain], {}, "kinds-triton") as through,
        open_lane(stack.grpc_address) as lane,
    ):
        for kind, label, port in (
            ("tidegate", "Tidegate's lane", stack.port),
            ("triton", "plain contract", through.port),
        ):
            draw = random.Random(SEED)
            took = [
                await freed_ms(lane, running_stream(port, "demo"), draw)
                for _ in range(_WARM_UP + (10 if context.quick else 40))
            ]
            name = f"kinds.{kind}.freed_ms"
            what = f"{label}: client gone until the slot is free"
            figures.append(Figure.of(name, what, "ms", took[_WARM_UP:], spread="p5–p95"))
    return figures


BENCH = Bench(
    "kinds",
    f"{STREAMS} streams of {1000 / STEP_MS:.0f} tokens/s over every kind of instance, and aborts",
    run,
    limit_s=240,
    in_quick=False,
)
