"""Runs of calls whose tools are slow now and then, and what an agent can do about it.

Load and instances are the short runs of ``perf.sim.run_loads``: agents make up half of the work,
and each of their calls states the run's deadline and how many calls are to come. A tool takes 0.2 s
on average; one in ten, say, takes from 1 to 100 s instead (each order of magnitude is as likely),
which a run's deadline does not allow for. The same runs at the same times, with each manner:

- ``wait``      a tool takes as long as it takes
- ``1s`` …      each tool has that long, whatever is left of the run
- ``quarter``   ``tidegate.tool_deadline(share=0.25)``, as client/examples/agent_chain.py has it
- ``calls``     ``tidegate.tool_deadline(share=1 / (1 + calls to come))``

A run goes on without the result of a tool that was cut. It is kept when its last answer is there in
time, and whole if no tool's result was missing.

    python -m perf.sim.slow_tools [--seconds 75] [--loads 0.6 0.9 1.2] [--slow 0.05 0.1 0.2]
                                [--json PATH]
"""

import asyncio
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

from perf.report.bundle import BenchResult, Figure
from perf.report.command import begin, new_parser, result
from perf.sim.arrivals import SimArrival
from perf.sim.chains import KeptRuns, UseTool, kept_figures, measure, wait_for_tool
from perf.sim.run_loads import SHORT, AgentRun
from tidegate import ToolTimeout, _clock, deadline, tool_deadline

SLOW_S = (1.0, 100.0)
FIXED_S = (1.0, 2.0, 5.0)


async def use_a_share(share: float, tool_s: float, left_s: float) -> bool:
    """Wait for a tool for at most its share of the run's time, by the client's own means."""
    try:
        with deadline(left_s):
            async with tool_deadline(share=share):
                await asyncio.sleep(tool_s)
    except ToolTimeout:
        return False
    return True


def _fixed(limit_s: float) -> UseTool:
    async def use_tool(tool_s: float, left_s: float, calls_left: int) -> bool:
        await asyncio.sleep(min(tool_s, limit_s))
        return tool_s <= limit_s

    return use_tool


MANNERS: dict[str, UseTool] = {
    "wait": wait_for_tool,
    **{f"{limit_s:g}s": _fixed(limit_s) for limit_s in FIXED_S},
    "quarter": lambda tool_s, left_s, calls_left: use_a_share(0.25, tool_s, left_s),
    "calls": lambda tool_s, left_s, calls_left: use_a_share(1 / (1 + calls_left), tool_s, left_s),
}


def with_slow_tools(
    load: Iterable[AgentRun | SimArrival], slow_share: float, seed: int
) -> Iterator[AgentRun | SimArrival]:
    """``load`` with ``slow_share`` (0 to 1) of its tools slow, and its deadlines as they were."""
    rng = random.Random(seed)
    least_s, most_s = SLOW_S
    for one in load:
        if isinstance(one, AgentRun):
            slow_s = [least_s * (most_s / least_s) ** rng.random() for _ in one.tools_s]
            one = replace(
                one,
                tools_s=[
                    slow if rng.random() < slow_share else usual
                    for slow, usual in zip(slow_s, one.tools_s, strict=True)
                ],
            )
        yield one


def measure_manner(
    load: Sequence[AgentRun | SimArrival], manner: str, *, seed: int, warm_s: float = 15.0
) -> KeptRuns:
    """Simulate agents that all do as ``manner`` says."""
    # The client's clock is the simulation's.
    with patch.object(_clock, "now", lambda: asyncio.get_running_loop().time()):
        return measure(
            load, "calls", SHORT.fleet, seed=seed, warm_s=warm_s, use_tool=MANNERS[manner]
        )


def main(argv: Sequence[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=75.0,
        help="of load per cell, the first 15 of which do not count",
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.9, 1.2])
    parser.add_argument("--slow", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--manners", nargs="+", choices=MANNERS, default=list(MANNERS))
    args = parser.parse_args(argv)
    recording = begin(parser, args, "perf.sim.slow_tools", *argv, seed=0)
    results: list[BenchResult] = []
    print(
        f"{'load':>5} {'slow':>5} {'tools':8} {'runs kept':>16} {'whole':>6} {'× wait':>7}"
        f" {'others kept':>12}"
    )
    for load in args.loads:
        for slow in args.slow:
            what = f"runs at {load:g} times the capacity, {slow:.0%} of the tools slow"
            with result(results, f"slow-tools-{load:g}x-{100 * slow:g}", what) as found:
                found += measure_all(load, slow, args.manners, args.seconds, args.seeds)
    recording.save(recording.bundle(results))
    return 1 if any(one.failed for one in results) else 0


def measure_all(
    load: float, slow: float, manners: Sequence[str], seconds: float, seeds: int
) -> list[Figure]:
    """Figures of every manner at one load; prints a row for each."""
    found: list[Figure] = []
    waited, wait_shares = 0, list[float]()
    for manner in manners:
        cells = []
        for seed in range(seeds):
            drawn = SHORT.draw(SHORT.rates(load), seconds, seed)
            cells.append(measure_manner([*with_slow_tools(drawn, slow, seed)], manner, seed=seed))
        above, shares = f"{load:g}x.{100 * slow:g}.{manner}", [one.run_share for one in cells]
        found += kept_figures(above, manner, cells)
        if manner == "wait":
            waited, wait_shares = sum(one.runs_kept for one in cells), shares
        elif wait_shares and all(wait_shares):
            times = [mine / theirs for mine, theirs in zip(shares, wait_shares, strict=True)]
            label = f"{manner}: runs kept, times as many as with wait"
            found.append(Figure.of(f"{above}.times", label, "", times, better="higher"))
        print(f"{load:5g} {slow:5.0%} {manner:8} {_row(cells, waited)}", flush=True)
    return found


def _row(cells: Sequence[KeptRuns], waited: int) -> str:
    """Runs kept of all, those kept whole, how many times as many as without a limit were kept, and
    the share of others' requests that were."""
    kept, runs = sum(one.runs_kept for one in cells), sum(one.runs for one in cells)
    others = sum(one.others_kept for one in cells) / max(1, sum(one.others for one in cells))
    whole = sum(one.runs_whole for one in cells)
    times = f"{kept / waited:.2f}" if waited else "–"
    return f"{f'{kept} of {runs}':>16} {whole:6} {times:>7} {others:12.1%}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
