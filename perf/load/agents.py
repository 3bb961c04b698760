"""``client/examples/agent_chain.py`` against a service that runs, with tools that are slow now and
then: as it stands, with a share of what is left for each tool, and as agents do without it, which
wait. The same runs with the same tools by turns, a few at a time.

    tidegate up --device cpu
    python -m perf.load.agents [--url http://127.0.0.1:8080] [--runs 40] [--at-once 2] [--seconds 8]

A tool takes 0.2 s on average; one in ten (``--slow``) takes from 1 to 100 s instead, each order of
magnitude as likely. A run is kept when its last answer is there in time, and whole if no tool's
result was missing.
"""

import argparse
import asyncio
import io
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import redirect_stdout
from contextvars import ContextVar
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from tidegate import TidegateError, ToolTimeout

EXAMPLE = Path(__file__).parents[2] / "client/examples/agent_chain.py"
TOOL_S = 0.2
SLOW_S = (1.0, 100.0)

Run = Callable[..., Awaitable[str]]
_tools: ContextVar["_Tools"] = ContextVar("tools")


class _Tools:
    """What one run's tools take, in seconds, and how many of them were cut."""

    def __init__(self, rng: random.Random, slow_share: float) -> None:
        self._rng = rng
        self._slow_share = slow_share
        self.cut = 0

    def next_s(self) -> float:
        least_s, most_s = SLOW_S
        usual_s = self._rng.expovariate(1 / TOOL_S)
        slow_s = least_s * (most_s / least_s) ** self._rng.random()
        return slow_s if self._rng.random() < self._slow_share else usual_s


def load_example(*, limited: bool) -> Run:
    """The example's ``run``, its tools as ``_tools`` has them, with their limit or without."""
    spec = spec_from_file_location("agent_chain", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example: Any = module_from_spec(spec)
    spec.loader.exec_module(example)
    tool = example.use_a_tool if limited else example.use_a_tool.__wrapped__

    async def use_a_tool(_: float) -> None:
        tools = _tools.get()
        try:
            await tool(tools.next_s())
        except ToolTimeout:
            tools.cut += 1
            raise

    example.use_a_tool = use_a_tool
    run: Run = example.run
    return run


async def keep(run: Run, args: argparse.Namespace, seed: int) -> tuple[bool, bool]:
    """Make one run; whether it was kept, and whole."""
    tools = _Tools(random.Random(seed), args.slow)
    _tools.set(tools)
    try:
        async with asyncio.timeout(args.seconds):  # its user waits no longer, for a tool neither
            await run("a fox who learns to sail", args.url, args.seconds)
    except (TidegateError, TimeoutError):
        return False, False
    return True, not tools.cut


async def keep_all(args: argparse.Namespace) -> dict[str, list[tuple[bool, bool]]]:
    manners = {"wait": load_example(limited=False), "share": load_example(limited=True)}
    kept: dict[str, list[tuple[bool, bool]]] = {name: [] for name in manners}
    for first in range(0, args.runs, args.at_once):
        seeds: Sequence[int] = range(first, min(first + args.at_once, args.runs))
        for name, run in manners.items():
            made = (asyncio.create_task(keep(run, args, seed)) for seed in seeds)
            with redirect_stdout(io.StringIO()):
                kept[name] += await asyncio.gather(*made)
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a run")
    parser.add_argument("--slow", type=float, default=0.1, help="share of the tools (0 to 1)")
    args = parser.parse_args()
    kept = asyncio.run(keep_all(args))
    waited = sum(is_kept for is_kept, _ in kept["wait"])
    for name, runs in kept.items():
        count, whole = sum(is_kept for is_kept, _ in runs), sum(is_whole for _, is_whole in runs)
        times = f", {count / waited:.2f} times as many as with wait" if waited else ""
        print(f"{name:6} {count} of {len(runs)} runs kept, {whole} of them whole{times}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
