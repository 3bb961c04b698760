"""``make bench-goodput``: what a deadline is worth when more is asked than can be done (PF-2).

    python -m perf.goodput [--quick] [--engine paced|demo] [--json PATH] [--plot STEM]

Two real Tritons with the paced synthetic engine, whose batch behaviour is that of the demo model
on a CPU, slowed by a factor (``perf.fit_pace``). An open-loop generator offers 0.5 to 3 times what
the two can do, as measured first, to one orchestrator per policy. Loads are run one after the other
and policies in turns within each, so that what else the machine does falls on all alike.

A request is *met* when its whole answer is there by its own deadline, judged by the client, whether
the service was told of it or not. Goodput is met requests per second, attainment their share of
those offered, waste the share of tokens that went to requests which were not met.
"""

import argparse
import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from orchestrator.provision.paths import state_dir
from orchestrator.provision.service import OrchestratorProcess
from orchestrator.provision.triton import find_triton
from perf import goodput_plot
from perf.bundle import BenchResult, Bundle, write
from perf.goodput_cell import Cell, cell_of, show_cells
from perf.goodput_policies import FIFO, OURS, POLICIES, Policy
from perf.lane import open_lane
from perf.load import PATH, apply_openloop, ask_of
from perf.machine import commit, describe_machine, versions
from perf.metrics import Scrape, scrape
from perf.openloop import Plan, Result
from perf.stack import HOST, StackSpec, orchestrating, tritons
from perf.stats import percentile
from perf.workload import Arrival, Sizes, Speed, Workload
from worker.protocol import ModelCard

SEED = 20240229
SLOTS = 8
INSTANCES = 2
# perf.fit_pace on the demo model, 2 cores: 1.28 ms + 0.127 ms a row + 0.088 ms a prompt token.
SLOWER = 5.0
STEP_MS, ROW_MS, PROMPT_TOKEN_MS = 1.28 * SLOWER, 0.127 * SLOWER, 0.088 * SLOWER
FULL_STEP_MS = STEP_MS + ROW_MS * SLOTS + PROMPT_TOKEN_MS * 16
"""Of a busy engine: every slot decodes, and a third of a prompt comes beside."""
_IDLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure. Seconds."""

    loads: tuple[float, ...]
    warm_s: float
    window_s: float
    flood: int
    """Requests at once that show the capacity."""

    @property
    def seconds(self) -> float:
        return self.warm_s + self.window_s


FULL = Size((0.5, 1.0, 1.5, 2.0, 3.0), warm_s=4.0, window_s=12.0, flood=240)
QUICK = Size((1.0, 2.0), warm_s=1.5, window_s=3.5, flood=100)
DEMO = Size((1.0, 2.0), warm_s=3.0, window_s=10.0, flood=400)


@dataclass(frozen=True, slots=True)
class Experiment:
    """An engine, and the work that suits it."""

    spec: StackSpec
    workload: Workload
    size: Size
    policies: tuple[Policy, ...]


def paced(card: ModelCard, size: Size, spec: StackSpec) -> Experiment:
    speed = Speed(PROMPT_TOKEN_MS, FULL_STEP_MS)
    return Experiment(spec, Workload(speed, card.vocab_size), size, POLICIES)


def demo(card: ModelCard, size: Size, spec: StackSpec) -> Experiment:
    """The real engine: two of them share this machine's cores, so each has half the speed."""
    speed = Speed(2 * PROMPT_TOKEN_MS / SLOWER, 2 * FULL_STEP_MS / SLOWER)
    answers = Sizes(median=48, sigma=0.7, least=8, most=192)
    workload = Workload(speed, card.vocab_size, answers=answers)
    return Experiment(spec, workload, size, (OURS, FIFO))


def spec_of(engine: str) -> StackSpec:
    if engine == "demo":
        return StackSpec("torch", max_running=SLOTS)
    return StackSpec(
        "synthetic-paced",
        step_ms=STEP_MS,
        row_ms=ROW_MS,
        prompt_token_ms=PROMPT_TOKEN_MS,
        max_running=SLOTS,
    )


async def run(
    engine: str, size: Size, only: Collection[str], console: Console
) -> tuple[list[Cell], float, ModelCard]:
    """All cells, the capacity in requests per second, and the model's card.

    ``only`` names the policies to run, FIFO beside them; all of them when it is empty.
    """
    spec = spec_of(engine)
    async with AsyncExitStack() as stack:
        instances = await stack.enter_async_context(tritons(spec, INSTANCES))
        addresses = [instance.grpc_address for instance in instances]
        async with open_lane(addresses[0]) as lane:
            card = lane.card
        experiment = (demo if engine == "demo" else paced)(card, size, spec)
        if only:
            kept = [p for p in experiment.policies if p.name in only or p is FIFO]
            experiment = replace(experiment, policies=tuple(kept))
        services = {
            policy.name: await stack.enter_async_context(
                orchestrating(addresses, policy.env(), f"goodput-{policy.name}")
            )
            for policy in experiment.policies
        }
        capacity = await _capacity(experiment, services, card)
        console.print(f"capacity: {capacity:.1f} requests/s", style="dim")
        cells = []
        for load in size.loads:
            arrivals = experiment.workload.arrivals(load * capacity, size.seconds, SEED)
            for policy in experiment.policies:
                cell = await _cell(policy, services[policy.name], card, load, arrivals, size)
                console.print(cell.line(), style="dim")
                cells.append(cell)
        return cells, capacity, card


async def _capacity(
    experiment: Experiment, services: dict[str, OrchestratorProcess], card: ModelCard
) -> float:
    """Requests per second with every slot full: the middle of a flood without deadlines."""
    arrivals = experiment.workload.at_once(experiment.size.flood, SEED + 1)
    results = await _offer(FIFO, services[FIFO.name], card, arrivals, linger_s=60.0)
    ends = sorted(result.end_s for result in results if result.complete)
    if len(ends) < len(arrivals):
        raise RuntimeError(f"{len(arrivals) - len(ends)} of {len(arrivals)} requests failed")
    first, last = percentile(ends, 15), percentile(ends, 85)
    # Everybody learns the pace from the frames of this flood, as a service that has run for a
    # while would have: what a cold start does is another question.
    for policy in experiment.policies:
        await _offer(policy, services[policy.name], card, arrivals[: 4 * SLOTS], linger_s=10.0)
    return 0.7 * len(ends) / (last - first)


async def _cell(
    policy: Policy,
    service: OrchestratorProcess,
    card: ModelCard,
    load: float,
    arrivals: list[Arrival],
    size: Size,
) -> Cell:
    before = await scrape(HOST, service.port)
    linger_s = max(arrival.deadline_ms for arrival in arrivals) / 1000 + 0.25
    results = await _offer(policy, service, card, arrivals, linger_s)
    after = await scrape(HOST, service.port)
    measured = [
        (arrival, result)
        for arrival, result in zip(arrivals, results, strict=True)
        if arrival.at_s >= size.warm_s
    ]
    return cell_of(policy, load, size.window_s, measured, Scrape.between(before, after))


async def _offer(
    policy: Policy,
    service: OrchestratorProcess,
    card: ModelCard,
    arrivals: list[Arrival],
    linger_s: float,
) -> list[Result]:
    """Run a load against a service, and wait until its workers have nothing left of it."""
    asks = [ask_of(card.model, arrival) for arrival in arrivals]
    results = await apply_openloop(
        Plan(HOST, service.port, PATH, asks, policy.states_deadline, linger_s)
    )
    end = time.monotonic() + _IDLE_S
    while not (await scrape(HOST, service.port)).is_idle:
        if time.monotonic() > end:
            raise RuntimeError(f"{policy.label}: work was left {_IDLE_S:.0f} s after its clients")
        await asyncio.sleep(0.1)
    return results


async def _main(args: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    size = QUICK if args.quick else DEMO if args.engine == "demo" else FULL
    if args.loads:
        size = replace(size, loads=tuple(args.loads))
    machine, begun = describe_machine(), time.monotonic()
    cells, capacity, card = await run(args.engine, size, args.policies, console)
    seconds = round(time.monotonic() - begun, 1)
    show_cells(cells, console)
    bundle = Bundle(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["python", "-m", "perf.goodput", *sys.argv[1:]]),
        commit=commit(),
        quick=args.quick,
        machine=machine,
        versions=versions() | {"triton": find_triton(None, state_dir()).version},
        engine=f"{card.engine} {card.engine_version}",
        engine_digest=card.engine_digest,
        model=card.model,
        model_digest=card.model_digest,
        results=[
            BenchResult(
                f"goodput-{args.engine}",
                f"{INSTANCES} instances of {SLOTS} slots, capacity {capacity:.1f} requests/s",
                seconds,
                [figure for cell in cells for figure in cell.figures()],
            )
        ],
    )
    if args.json:
        write(bundle, args.json)
    if args.plot:
        for path in goodput_plot.draw(cells, capacity, args.plot):
            console.print(f"wrote {path}")
    _judge(cells, console)
    return 0


def _judge(cells: list[Cell], console: Console) -> None:
    """The aims of the issue, said plainly; a busy machine may miss them, so nothing fails."""
    ours = {cell.load: cell for cell in cells if cell.policy == OURS.name}
    if not {1.0, 2.0} <= set(ours):
        return
    kept = ours[2.0].goodput / ours[1.0].goodput if ours[1.0].goodput else 0.0
    wasted = sum(cell.wasted for cell in ours.values()) / sum(c.tokens for c in ours.values())
    sampled = sum(cell.sampled for cell in ours.values())
    false = sum(cell.sampled_met for cell in ours.values())
    console.print(
        f"goodput at 2 × is {100 * kept:.0f} % of that at 1 × (aim: 95 % or more); waste over all "
        f"loads {100 * wasted:.2f} % (aim: under 1 %); false refusals {false} of {sampled} sampled "
        "(aim: under 1 %)"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two loads, a few seconds each")
    parser.add_argument("--engine", choices=("paced", "demo"), default="paced")
    parser.add_argument(
        "--policies", nargs="+", choices=[p.name for p in POLICIES], default=[], metavar="NAME"
    )
    parser.add_argument("--loads", nargs="+", type=float, default=[], metavar="FACTOR")
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the bundle as JSON")
    parser.add_argument("--plot", type=Path, metavar="STEM", help="draw STEM.png and STEM.svg")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(_main(parse_args())))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
