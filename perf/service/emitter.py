"""CPU time of one event from token to socket: the orchestrator's emitter and a simple one (PF-1).

Both are aiohttp servers with free tokens, 32 clients each, one token per write. ``stack.emitter``
uses the orchestrator's own classes; with ``plain``, one ``json.dumps`` and one
``await response.write`` per token. The promise is 15 to 30 % less, so a ratio below 0.85.

The ratio depends on the CPU, not only on the commit: 0.50 on the Intel Xeon of the recorded run,
0.60 to 0.76 on an AMD EPYC, 0.92 on a Zen 5. There the promise is missed: a bare ``write`` to such
a socket takes 4.2 to 4.5 µs of CPU, as much as the whole emitter. The tolerance of 2 makes the
simple server's cost the limit.
"""

from perf.load.drive import CLIENTS, FloodTarget, in_turns, ratios, us_per_token
from perf.report.bundle import Figure
from perf.stack.context import Bench, BenchContext
from perf.stack.stack import emitter_server


async def run(context: BenchContext) -> list[Figure]:
    async with emitter_server() as emitter, emitter_server("plain") as baseline:
        assert emitter.pid is not None
        assert baseline.pid is not None
        results = await in_turns(
            FloodTarget(emitter.port, {"server": emitter.pid}),
            FloodTarget(baseline.port, {"server": baseline.pid}),
            quick=context.quick,
        )
    ours, plain = (us_per_token(result, "server") for result in results)
    of = Figure.of
    return [
        of("emitter.cpu_us_per_token", "orchestrator's emitter, CPU", "µs/token", ours),
        of("emitter.baseline_cpu_us_per_token", "baseline, CPU", "µs/token", plain),
        of("emitter.ratio", "emitter ÷ baseline", "", ratios(ours, plain), tolerance=2.0),
    ]


BENCH = Bench("emitter", f"one event per write to {CLIENTS} clients, no Triton", run, limit_s=90)
