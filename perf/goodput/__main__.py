"""``make bench-goodput``: measures the benefit of deadlines under overload (PF-2).

    python -m perf.goodput [--trace FILE]… [--arrivals poisson|trace]
        [--deadlines proportional|constant|parts …] [--model MODEL [--device cpu]] [--turns N]
        [--json PATH]

It runs two real Tritons with the paced synthetic engine, which batches like the demo model on a
CPU, slowed by a factor. It first measures the capacity of both. Then an open-loop generator offers
0.5 to 3 times that to one orchestrator per policy. Loads run one after the other; policies take
turns within a load, so that other work on the machine affects all of them equally.

Prompts, answers and arrivals come from a trace (``perf.load.trace``), scaled to the engine; without
a trace, they are log-normal and Poisson. Answers are *open*: every request states the same generous
cap, and only the engine knows where an answer ends. As an upper bound, one policy is Tidegate with
clients that know and state the true lengths.

With ``--model``, it runs one Triton with our engine and that checkpoint, on a GPU unless
``--device`` is given. Prompts and deadlines then have the trace's lengths. Answers end where the
model samples an end token. So clients cannot state lengths, and deadlines are not proportional to
them. ``--model 8b --answers 28`` first writes random weights of that shape, with enough end tokens
for that mean length.

A request is *met* if its whole answer arrives by its deadline, and each part by the deadline for
that part, if any. The client judges this, even if the service does not know the deadline. Goodput
is met requests per second. Attainment is their share of the offered requests. Waste is the share of
tokens of requests that were not met.

The rivals here are settings of one orchestrator: earliest deadline first with expiry, and first
come, first served with clients that hang up at their deadline, as any user of vLLM can do. Rivals
from papers (JITServe, QoServe, SLOs-Serve) decide in each step which jobs an engine runs, so only
the simulator has them (``perf.sim``).
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from catalog.paths import state_dir
from perf import SEED
from perf.engine.checkpoints import SHAPES, make_checkpoint, roomy_folder, set_ends
from perf.goodput.front import Front, fronts
from perf.goodput.load import (
    DrawnLoad,
    LoadSource,
    at_once,
    drawn_load,
    log_normal,
    source_of,
)
from perf.goodput.policies import COMPARED, EVERY, HANG_UP, Policy
from perf.load.connection import HOST
from perf.load.drive import PATH
from perf.load.lane import BenchLane, open_lane
from perf.load.open_loop import NEVER_MS, StreamRequest
from perf.load.outcomes import Cell, OfferedTurn
from perf.load.trace import Manner
from perf.load.workload import Speed
from perf.report.bundle import BenchResult, Figure
from perf.report.command import begin, new_console, new_parser, status_of
from perf.report.stats import percentile
from perf.report.table import show
from perf.stack.scrape import Scrape, scrape
from perf.stack.stack import StackSpec, tritons
from pool.engines.triton import find_triton
from protocol import ModelCard

SLOTS = 8
INSTANCES = 2
# The demo model's steps on 2 cores take 1.28 ms + 0.127 ms a row + 0.088 ms a prompt token.
SLOWER = 5.0
STEP_MS, ROW_MS, PROMPT_TOKEN_MS = 1.28 * SLOWER, 0.127 * SLOWER, 0.088 * SLOWER
FULL_STEP_MS = STEP_MS + ROW_MS * SLOTS + PROMPT_TOKEN_MS * 16
"""Step of a busy engine in ms: every slot decodes, and a third of a prompt is prefilled."""
SPEED = Speed(PROMPT_TOKEN_MS, FULL_STEP_MS)


@dataclass(frozen=True, slots=True)
class GoodputSize:
    """Size of a run: loads in multiples of the capacity, times in seconds."""

    loads: tuple[float, ...]
    warm_s: float
    window_s: float
    flood: int
    """Number of requests sent at once to find the capacity."""
    turns: int = 1
    """Number of windows of each policy at each load; each has its own seed."""

    @property
    def seconds(self) -> float:
        return self.warm_s + self.window_s


FULL = GoodputSize((0.5, 1.0, 1.5, 2.0, 3.0), warm_s=4.0, window_s=12.0, flood=240)
_SAMPLES = "tidegate_infeasible_samples_total"


Worked = Mapping[str, float]
"""Growth of a worker's totals (``WorkerStats``, without ``_total``) in a window of ``seconds``."""
_COUNTED = ("tokens", "steps", "busy_ms", "prefill_tokens", "prompt_steps", "prompt_busy_ms")


def _worked(of: Worked) -> Iterator[tuple[str, str, float]]:
    """Key, unit and value of each figure."""
    prompts, decodes = of["prompt_steps"], of["steps"] - of["prompt_steps"]
    yield "prompt_tokens_per_s", "tokens/s", of["prefill_tokens"] / of["seconds"]
    yield "rows", "tokens/step", of["tokens"] / of["steps"]
    yield "decode_step_ms", "ms", (of["busy_ms"] - of["prompt_busy_ms"]) / max(1.0, decodes)
    yield "prompt_step_ms", "ms", of["prompt_busy_ms"] / max(1.0, prompts)
    yield "prompt_steps", "of all steps", prompts / of["steps"]


class Scene(NamedTuple):
    """A trace and a kind of deadlines, for a comparison of policies at one load after the
    other."""

    trace: str
    manner: Manner

    def __str__(self) -> str:
        return f"{self.trace}, deadlines: {self.manner}"

    def cell(
        self,
        policy: Policy,
        load: float,
        turns: Sequence[OfferedTurn],
        counted: Scrape,
        worked: Sequence[Worked] = (),
        bursts: int = 0,
    ) -> Cell:
        """Cell of the requests of some windows, ``bursts`` of which are one burst. ``counted`` has
        the service's counts for them, ``worked`` the workers' totals per window. Requests that were
        admitted as samples instead of refused, and were met, are false refusals."""
        key = f"{self.trace}.{self.manner}.{load:g}x.{policy.name}"
        name = f"{self.trace}, {self.manner}, {load:g} ×"
        if bursts:
            name += f" ({bursts} of {len(turns)} windows are one burst)"
        more = []
        if sampled := counted.total(_SAMPLES):
            met = counted.total(_SAMPLES, result="met")
            label = f"{name}, {policy.label}: false among refusals sampled"
            more.append(Figure.of(f"{key}.false_refusals", label, "", [met / sampled]))
        figures = [list(_worked(of)) for of in worked if of["steps"]]
        for same in zip(*figures, strict=True):
            part, unit, _ = same[0]
            label = f"{name}, {policy.label}: {part.replace('_', ' ')}"
            values = [value for *_, value in same]
            more.append(Figure.of(f"{key}.{part}", label, unit, values, better="neither"))
        return Cell(key, name, policy.label, turns, rate_key="goodput_per_s", more=more)


@dataclass(frozen=True, slots=True)
class GoodputOptions:
    """Policies to compare, and the loads to compare them on."""

    sources: tuple[LoadSource, ...]
    manners: tuple[Manner, ...]
    is_poisson: bool
    policies: tuple[Policy, ...]
    size: GoodputSize
    model: Path | None = None
    device: str = "cpu"

    @property
    def what(self) -> str:
        engine = (
            f"one instance of {self.model.name} on {self.device}"
            if self.model
            else f"{INSTANCES} instances of {SLOTS} slots"
        )
        return f"{engine}, {'Poisson' if self.is_poisson else 'trace'} arrivals, lengths open"

    @property
    def instances(self) -> int:
        return 1 if self.model else INSTANCES

    @property
    def spec(self) -> StackSpec:
        """Specification of each instance."""
        if self.model is None:
            return SPEC
        # The sizes of a step are its own: with 64 rows first come, first served looked bad.
        name = self.model.name
        return StackSpec("torch", self.device, max_running=0, model=self.model, model_name=name)

    def load(self, source: LoadSource, manner: Manner, card: ModelCard) -> DrawnLoad:
        return drawn_load(
            source,
            SPEED,
            manner,
            card.model,
            card.vocab_size,
            is_poisson=self.is_poisson,
            has_own_ends=self.model is not None,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Findings of a run. Capacities are in requests per second, by source."""

    cells: list[Cell]
    capacities: dict[str, float]
    card: ModelCard


SPEC = StackSpec(
    "synthetic-paced",
    step_ms=STEP_MS,
    row_ms=ROW_MS,
    prompt_token_ms=PROMPT_TOKEN_MS,
    lengths="prompt",
    max_running=SLOTS,
)


async def run(choices: GoodputOptions, console: Console) -> Measured:
    """Run all cells: policies in turns within a load, loads within a scene."""
    cells: list[Cell] = []
    capacities: dict[str, float] = {}
    async with tritons(choices.spec, choices.instances) as instances, AsyncExitStack() as stack:
        addresses = [instance.grpc_address for instance in instances]
        lanes = [await stack.enter_async_context(open_lane(address)) for address in addresses]
        card = lanes[0].card
        for source in choices.sources:
            for manner in choices.manners:
                scene = Scene(source.name, manner)
                load = choices.load(source, manner, card)
                policies = [p for p in EVERY if p in choices.policies or p is HANG_UP]
                # New ones for each scene, so that nothing learned from another scene counts.
                async with fronts([(policy, addresses) for policy in policies]) as ready:
                    contest = _Contest(scene, load, choices, ready, lanes)
                    if source.name not in capacities:
                        capacities[source.name] = await contest.capacity()
                    capacity = capacities[source.name]
                    console.print(f"{scene}: capacity {capacity:.1f} requests/s", style="dim")
                    await contest.warm_up()
                    for factor in choices.size.loads:
                        for cell in await contest.cells(factor, capacity):
                            console.print(cell.line(), style="dim")
                            cells.append(cell)
    return Measured(cells, capacities, card)


@dataclass(frozen=True, slots=True)
class _Contest:
    """Runs policies in turns at the same load."""

    scene: Scene
    load: DrawnLoad
    choices: GoodputOptions
    fronts: Mapping[str, Front]
    lanes: Sequence[BenchLane]

    async def capacity(self) -> float:
        """Requests per second with every slot full, from the middle of a flood without deadlines.

        It uses the same part of the trace as the cells, because its requests may be larger or
        smaller than the mean.
        """
        asks = at_once(self.load, self.choices.size.flood, SEED)
        results = await self.fronts[HANG_UP.name].offer(PATH, asks, linger_s=90.0)
        ends = sorted(result.end_s for result in results if result.complete)
        if len(ends) < len(asks):
            raise RuntimeError(f"{len(asks) - len(ends)} of {len(asks)} requests failed")
        return 0.7 * len(ends) / (percentile(ends, 85) - percentile(ends, 15))

    async def warm_up(self) -> None:
        """Let all policies learn pace and lengths from some requests, like a service that has run
        for a while. Cold starts are not measured here."""
        for policy in self.choices.policies:
            asks = at_once(
                self.load,
                self.choices.size.flood // 5,
                SEED + 2,
                knows_lengths=policy.knows_lengths,
            )
            await self.fronts[policy.name].offer(PATH, asks, linger_s=30.0)

    async def cells(self, factor: float, capacity: float) -> list[Cell]:
        """Windows of all policies at one load; a different policy is first in each turn."""
        size, policies, per_s = self.choices.size, self.choices.policies, factor * capacity
        found: dict[str, list[tuple[OfferedTurn, Scrape, Worked]]] = {
            policy.name: [] for policy in policies
        }
        seeds = self.load.seeds(per_s, size.seconds, size.turns)
        bursts = sum(self.load.is_burst(per_s, size.seconds, seed) for seed in seeds)
        for number, seed in enumerate(seeds):
            first = number % len(policies)
            for policy in policies[first:] + policies[:first]:
                knows = policy.knows_lengths
                asks = self.load.asks(per_s, size.seconds, seed, knows_lengths=knows)
                found[policy.name].append(await self._window(self.fronts[policy.name], asks))
        return [
            self.scene.cell(
                policy,
                factor,
                [turn for turn, *_ in found[policy.name]],
                Scrape.sum_of([counted for _, counted, _ in found[policy.name]]),
                [worked for *_, worked in found[policy.name]],
                bursts,
            )
            for policy in policies
        ]

    async def _totals(self) -> dict[str, float]:
        stats = [await lane.news() for lane in self.lanes]
        totals = {name: sum(getattr(one, f"{name}_total") for one in stats) for name in _COUNTED}
        return totals | {"seconds": time.monotonic()}

    async def _window(
        self, front: Front, asks: list[StreamRequest]
    ) -> tuple[OfferedTurn, Scrape, Worked]:
        """Requests of one policy, and the counts of the service and the workers for them."""
        began = await self._totals()
        before = await scrape(HOST, front.service.port)
        results = await front.offer(PATH, asks, max(map(_patience_s, asks)) + 0.25)
        counted = Scrape.between(before, await scrape(HOST, front.service.port))
        worked = {name: value - began[name] for name, value in (await self._totals()).items()}
        size = self.choices.size
        return OfferedTurn.of(asks, results, size.warm_s, size.window_s), counted, worked


def _patience_s(ask: StreamRequest) -> float:
    """Seconds after which no part of an answer can be in time."""
    if ask.deadline_ms < NEVER_MS:
        return ask.deadline_ms / 1000
    most = ask.body["max_tokens"]
    assert isinstance(most, int)
    return ask.due_ms(most, 0.0) / 1000


async def _main() -> int:
    parser = new_arguments()
    args = parser.parse_args()
    try:
        choices = choices_of(args)
    except ValueError as error:
        parser.error(str(error))
    recording = begin(parser, args, "perf.goodput", *sys.argv[1:], seed=SEED)
    console = new_console(130)
    begun = time.monotonic()
    with _written(choices, args.answers) as choices:
        measured = await run(choices, console)
    rows, tokens = measured.card.max_running, measured.card.max_step_tokens
    found = BenchResult(
        "goodput-model" if choices.model else "goodput-paced",
        f"{choices.what}, {rows} rows and {tokens} tokens a step, capacity "
        + ", ".join(f"{name} {x:.1f}/s" for name, x in measured.capacities.items()),
        round(time.monotonic() - begun, 1),
        [figure for cell in measured.cells for figure in cell.figures()],
    )
    triton = {"triton": find_triton(None, state_dir()).version}
    bundle = recording.bundle([found], measured.card, more_versions=triton)
    show(bundle, console)
    recording.save(bundle)
    return 0


@contextmanager
def _written(choices: GoodputOptions, answers: float | None) -> Iterator[GoodputOptions]:
    """``choices`` with an existing model: a shape is written first, and removed afterwards."""
    shape = choices.model.name if choices.model and not choices.model.exists() else ""
    if not shape:
        yield choices
        return
    with tempfile.TemporaryDirectory(prefix="tidegate-", dir=roomy_folder()) as folder:
        path = Path(folder) / f"random-{shape}"
        make_checkpoint(path, SHAPES[shape], seed=0)
        if answers:
            set_ends(path, SHAPES[shape], answers, seed=0)
        yield replace(choices, model=path)


def new_arguments() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--trace", action="append", default=[], type=Path, metavar="FILE", help="Azure's columns")
    add("--arrivals", choices=("poisson", "trace"), help="the trace's own where there is one")
    add("--model", type=Path, help="a checkpoint, or a shape of perf.engine.checkpoints")
    add("--answers", type=float, metavar="TOKENS", help="mean length, of a shape")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of the --model (cuda)")
    manners = [manner.value for manner in Manner]
    add("--deadlines", nargs="+", choices=manners, default=[], metavar="MANNER")
    add("--policies", nargs="+", choices=[p.name for p in EVERY], default=[], metavar="NAME")
    add("--loads", nargs="+", type=float, default=[], metavar="FACTOR")
    add("--seconds", type=float, metavar="S", help="of each window")
    turns = "windows of each policy at each load, in turns (1; of a model 3)"
    add("--turns", type=int, help=turns)
    return parser


def choices_of(args: argparse.Namespace) -> GoodputOptions:
    """Choices from the options. Raises ``ValueError`` for options that exclude each other."""
    size = FULL
    if args.loads:
        size = replace(size, loads=tuple(args.loads))
    if args.seconds:
        size = replace(size, window_s=args.seconds)
    size = replace(size, turns=args.turns or (3 if args.model else 1))
    if args.arrivals == "trace" and not args.trace:
        raise ValueError("--arrivals trace needs a --trace")
    default = Manner.CONSTANT if args.model else Manner.PROPORTIONAL
    choices = GoodputOptions(
        sources=tuple(source_of(file) for file in args.trace) or (log_normal(SEED),),
        manners=tuple(map(Manner, args.deadlines)) or (default,),
        is_poisson=args.arrivals == "poisson" or not args.trace,
        policies=tuple(p for p in EVERY if p.name in args.policies) or COMPARED,
        size=size,
        model=args.model,
        device=args.device if args.model else "cpu",
    )
    return _of_a_model(choices, has_trace=bool(args.trace)) if choices.model else choices


def _of_a_model(choices: GoodputOptions, *, has_trace: bool) -> GoodputOptions:
    """``choices`` without those for a synthetic engine only. Raises ``ValueError``."""
    assert choices.model is not None
    if not choices.model.exists() and str(choices.model) not in SHAPES:
        raise ValueError(
            f"--model {choices.model}: no such folder, and none of {', '.join(SHAPES)}"
        )
    if not has_trace:
        raise ValueError("--model needs a --trace: the requests drawn without one suit no model")
    if Manner.PROPORTIONAL in choices.manners:
        raise ValueError("--model ends its answers itself: --deadlines constant or parts")
    return replace(choices, policies=tuple(p for p in choices.policies if not p.knows_lengths))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
