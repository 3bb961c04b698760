"""What one and two orchestrator processes at a port relay, and what a token costs them.

Flood: 32 streams, one token per stream and step of 0.1 ms, so that the orchestrators have all that
they can do. Paced: 64 streams of 50 tokens/s, whose CPU per token says how many such streams a core
would carry if it did nothing else. Several processes share a store of their own, whose CPU is a
figure beside theirs; the kernel deals the connections out.

Triton, the worker and the load generator take their part of the same cores. So where there are two
cores, CPU per token says what a second process costs, and no rate says what it brings.
"""

from statistics import median

from catalog.errors import MachineUnfit
from perf.load.closed_loop import LoadResult
from perf.load.drive import FloodTarget, Windows, completion, flood, rates, stream
from perf.report.bundle import Figure
from perf.report.command import Skip
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec, at_one_port
from pool.units.store import find_store

COUNTS = (1, 2)
FLOOD_STEP_MS = 0.1
STREAMS = 64
STEP_MS = 20.0
_ROOM = 256
"""Jobs that the worker can run at once: no process waits for its share of them."""


async def run(context: Context) -> list[Figure]:
    try:
        find_store()
    except MachineUnfit as error:
        raise Skip(str(error)) from error
    figures: list[Figure] = []
    for name, step_ms in (("flood", FLOOD_STEP_MS), ("paced", STEP_MS)):
        spec = StackSpec(
            "synthetic-paced", device=context.device, step_ms=step_ms, max_running=_ROOM
        )
        stack = await context.stack(spec)
        for count in COUNTS:
            async with at_one_port([stack.grpc_address], count) as (port, pids):
                watch = {**pids, "worker": stack.pids()["worker"]}
                if name == "flood":
                    result = await _flood(context, port, watch)
                else:
                    result = await _paced(context, port, watch)
                figures += _figures(f"processes.{name}_{count}", f"{name}, {count}", result, pids)
    return figures


async def _flood(context: Context, port: int, watch: dict[str, int]) -> LoadResult:
    return await flood(FloodTarget(port, watch), Windows(1.0, 1.5, 3 if context.quick else 7))


async def _paced(context: Context, port: int, watch: dict[str, int]) -> LoadResult:
    windows = Windows(1.0, 1.0, 3) if context.quick else Windows(2.0, 2.0, 7)
    body = completion("demo", windows.tokens(STEP_MS))
    return await stream(port, body, STREAMS, windows, watch=watch)


def _figures(name: str, label: str, result: LoadResult, pids: dict[str, int]) -> list[Figure]:
    of = Figure.of
    ours = [each for each in pids if each != "store"]
    cpu = _us_per_token(result, ours)
    figures = [
        of(f"{name}.tokens_per_s", f"{label}: relayed", "tokens/s", rates(result), better="higher"),
        of(f"{name}.cpu_us_per_token", f"{label}: orchestrators' CPU", "µs/token", cpu),
        of(
            f"{name}.worker_cpu_us_per_token",
            f"{label}: worker's CPU",
            "µs/token",
            _us_per_token(result, ["worker"]),
        ),
    ]
    if "store" in pids:
        store = [1000 * window.cpu_s["store"] / window.seconds for window in result.windows]
        figures.append(of(f"{name}.store_cpu_ms_per_s", f"{label}: store's CPU", "ms/s", store))
    if "paced" in name:
        each = median(cpu) * 1000 / STEP_MS
        figures.append(
            of(
                f"{name}.streams_per_core",
                f"{label}: streams that a core would carry",
                "",
                [1e6 / each],
                better="higher",
            )
        )
    return figures


def _us_per_token(result: LoadResult, processes: list[str]) -> list[float]:
    """CPU of several watched processes in µs per token, window by window."""
    return [
        sum(window.cpu_s[each] for each in processes) * 1e6 / window.tokens
        for window in result.windows
    ]


BENCH = Bench(
    "processes",
    f"one and {COUNTS[-1]} orchestrator processes at a port: flooded, and {STREAMS} paced streams",
    run,
    limit_s=240,
    in_quick=False,
)
