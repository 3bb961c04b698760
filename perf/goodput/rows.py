"""``make bench-rows``: how many rows run at once, on the demo engine.

    python -m perf.goodput.rows [--cells NAME …] [--seeds N] [--seconds S]
                                [--stretch TIMES] [--capacity PER_S]

All of it takes an hour. Cells of ``perf.load.cells`` with 64 slots allowed. Policies take turns
within each cell and seed, so that what else the machine does falls on all alike: ours, ours with 16
rows, and first come, first served with 64 and with 16. Everybody's clients hang up at their
deadlines. 16 rows are another Triton's, whose worker has that many slots.

Machines differ, so the cells are fitted to this one first. All times of a cell are ``--stretch``
times as long as they were drawn: by default what a token takes here, where one answer runs alone,
over ``TOKEN_MS``. ``--capacity``, in requests per second before they are stretched, is by default
the highest rate tried at which first come, first served still meets 95 % of the cell ``capacity``.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from rich.console import Console

from catalog.paths import state_dir
from orchestrator.tasks.job import Priority
from perf.goodput.cell import is_met
from perf.goodput.offer import offer, services
from perf.goodput.policies import FIXED_ROWS, HANG_UP, OURS, Policy
from perf.load.cells import CAP_TOKENS, FACT_TOKENS, TOKEN_MS, Mix, Wish, mixes
from perf.load.lane import open_lane
from perf.load.open_loop import StreamRequest
from perf.report.bundle import BenchResult, Better, Figure
from perf.report.command import begin, new_console, new_parser, status_of
from perf.report.stats import median
from perf.report.table import grouped, new_table
from perf.stack.stack import StackSpec, tritons
from pool.engines.triton import find_triton
from pool.units.orchestrator import OrchestratorProcess
from tools.demo_model import words
from tools.demo_model.grammar import articles
from worker.protocol import ModelCard

SLOTS, FEWER = 64, 16
_OURS = replace(OURS, hangs_up=True)
_FIFO = replace(HANG_UP, name="fifo", label="FIFO")
_FIXED = replace(_OURS, name="ours@16", label="Tidegate, 16 rows", settings=FIXED_ROWS)
POLICIES: Final = (
    (_OURS, SLOTS),
    (_FIXED, FEWER),
    (_FIFO, SLOTS),
    (replace(_FIFO, name="fifo@16", label="FIFO, 16 rows"), FEWER),
)
"""Policies, each with the slots of its worker."""
_PATH = "/v1/chat/completions"
_WARM_S = 4.0
_ALONE = 5
"""Number of answers that run one after the other to tell how fast the machine is."""
_LEAST_STRETCH = 0.5
_SLOWEST_PER_S, _FASTEST_PER_S, _FASTER = 8.0, 60.0, 1.2
"""Rates tried for the capacity, in requests per second: lowest, highest, and the factor between."""
_CAPACITY_MET = 0.95
_WORDS_PER_TOKEN = 0.75
_WHO = (*words.ANIMALS, *words.GIRL_KINDS, *words.BOY_KINDS, *words.WORKERS)


class RowsRun(NamedTuple):
    """One policy in one cell with one seed; shares are 0 to 1."""

    met: int
    offered: int
    goodput: float
    waste: float
    tokens_per_s: float
    focus: float


@dataclass(frozen=True, slots=True)
class RowsCell:
    """One policy in one cell, over all seeds."""

    mix: Mix
    policy: Policy
    runs: tuple[RowsRun, ...]

    def figures(self) -> list[Figure]:
        def figure(name: str, unit: str, values: list[float], better: Better) -> Figure:
            key = f"{self.mix.name}.{self.policy.name}.{name}"
            label = f"{self.mix.name}, {self.policy.label}: {name.replace('_', ' ')}"
            return Figure.of(key, label, unit, values, better=better)

        figures = [
            figure("attainment", "", [run.met / run.offered for run in self.runs], "higher"),
            figure("met_per_s", "requests/s", [run.goodput for run in self.runs], "higher"),
            figure("waste", "", [run.waste for run in self.runs], "lower"),
            figure("tokens_per_s", "tokens/s", [run.tokens_per_s for run in self.runs], "neither"),
        ]
        if self.mix.focus:
            focus = [run.focus for run in self.runs]
            figures.append(figure(f"attainment_{self.mix.focus}", "", focus, "higher"))
        return figures

    def row(self) -> list[str]:
        met = [100 * run.met / run.offered for run in self.runs]
        focus = 100 * median([run.focus for run in self.runs])
        return [
            f"{self.mix.name}, {self.mix.per_s:g}/s",
            self.policy.label,
            f"{median(met):.1f} ({min(met):.1f} … {max(met):.1f})",
            f"{median([run.goodput for run in self.runs]):.1f}",
            f"{100 * median([run.waste for run in self.runs]):.1f}",
            f"{median([run.tokens_per_s for run in self.runs]):.0f}",
            f"{self.mix.focus} {focus:.0f} %" if self.mix.focus else "",
        ]


def asks_of(mix: Mix, seconds: float, seed: int, model: str) -> list[StreamRequest]:
    """Requests of the cell as chats; the model ends them itself, about as long as was wished."""
    rng = random.Random(seed)
    return [
        StreamRequest(w.at_s, w.deadline_ms, _body(w, model, rng))
        for w in mix.wishes(seconds, seed)
    ]


def _body(wish: Wish, model: str, rng: random.Random) -> dict[str, object]:
    if wish.answer_tokens < FACT_TOKENS:
        text = rng.choice(words.FACTS)[0]
    else:
        text = articles(
            f"Tell me a story about a {rng.choice(_WHO)} and a {rng.choice(words.THINGS)}."
        )
    if wish.prompt_tokens > 1000:
        pages = rng.choices(words.THINGS, k=int(_WORDS_PER_TOKEN * wish.prompt_tokens))
        text = f"{' '.join(pages)}. {text}"
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": CAP_TOKENS,
        "temperature": 1.0,
        "seed": rng.randrange(2**31),
        "tenant": wish.tenant,
        "priority": wish.priority.value,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Fronts(NamedTuple):
    """Orchestrators by policy, and the model that they serve; ``stretch`` as in ``--stretch``."""

    services: dict[str, OrchestratorProcess]
    model: str
    stretch: float = 1.0

    async def run(self, mix: Mix, policy: Policy, seconds: float, seed: int) -> RowsRun:
        """Run a policy for ``seconds`` times the stretch, after a warm-up."""
        mix = mix.stretched(self.stretch)
        warm_s, seconds = self.stretch * _WARM_S, self.stretch * seconds
        asks = asks_of(mix, warm_s + seconds, seed, self.model)
        most_s = max(ask.deadline_ms for ask in asks) / 1000 + 0.25
        results = await offer(self.services[policy.name], policy, _PATH, asks, most_s)
        wishes = mix.wishes(warm_s + seconds, seed)
        met = made = kept = offered = 0
        focus: list[bool] = []
        for wish, ask, result in zip(wishes, asks, results, strict=True):
            if wish.at_s < warm_s:
                continue
            is_kept = is_met(ask, result)
            offered += 1
            met += is_kept
            made += result.tokens
            kept += result.tokens * is_kept
            if wish.kind == mix.focus:
                focus.append(is_kept)
        share = sum(focus) / len(focus) if focus else 0.0
        return RowsRun(met, offered, met / seconds, 1 - kept / max(1, made), made / seconds, share)

    async def token_ms(self, policy: Policy) -> float:
        """Median time of a token in ms where one answer runs alone, the first token left out."""
        found = []
        for number in range(_ALONE):
            wish = Wish(0.0, "stories", 0, FACT_TOKENS, 60_000.0, "all", Priority.INTERACTIVE)
            body = _body(wish, self.model, random.Random(number))
            ask = StreamRequest(0.0, wish.deadline_ms, body)
            (result,) = await offer(self.services[policy.name], policy, _PATH, [ask], 60.0)
            found.append(1000 * (result.end_s - result.first_s) / max(1, result.tokens - 1))
        return median(found)

    async def capacity_per_s(self, policy: Policy, seconds: float, seed: int) -> float:
        """Highest rate tried at which ``policy`` meets 95 % of the cell ``capacity``."""
        held = per_s = _SLOWEST_PER_S
        while per_s < _FASTEST_PER_S:
            mix = next(mix for mix in mixes(per_s) if mix.name == "capacity")
            found = await self.run(mix, policy, seconds, seed)
            if found.met < _CAPACITY_MET * found.offered:
                break
            held, per_s = per_s, per_s * _FASTER
        return held


class RowsFindings(NamedTuple):
    """Findings of a run; ``capacity`` is in requests per second before they are stretched."""

    cells: list[RowsCell]
    card: ModelCard
    stretch: float
    capacity: float


async def run(args: argparse.Namespace, console: Console) -> RowsFindings:
    """Run all cells; within a seed the policies in turns, another one first each time."""
    cells: list[RowsCell] = []
    async with AsyncExitStack() as stack:
        addresses: dict[int, list[str]] = {}
        for slots in (SLOTS, FEWER):
            spec = StackSpec("torch", max_running=slots)
            (triton,) = await stack.enter_async_context(tritons(spec, 1))
            addresses[slots] = [triton.grpc_address]
        async with open_lane(addresses[SLOTS][0]) as lane:
            card = lane.card
        served = [(policy, addresses[slots]) for policy, slots in POLICIES]
        fronts = Fronts(await stack.enter_async_context(services(served)), card.model)
        policies = [policy for policy, _ in POLICIES]
        for policy in policies:  # what a cold start does is another question
            await fronts.run(mixes(_SLOWEST_PER_S)[0], policy, 2.0, args.seed - 1)
        stretch = args.stretch or max(_LEAST_STRETCH, await fronts.token_ms(_FIFO) / TOKEN_MS)
        fronts = fronts._replace(stretch=stretch)
        capacity = args.capacity or await fronts.capacity_per_s(_FIFO, args.seconds, args.seed)
        console.print(f"times {stretch:.2f} as long, capacity {capacity:.1f}/s before", style="dim")
        for mix in mixes(capacity):
            if args.cells and mix.name not in args.cells:
                continue
            runs: dict[str, list[RowsRun]] = {policy.name: [] for policy in policies}
            for number in range(args.seeds):
                turn = number % len(policies)
                for policy in policies[turn:] + policies[:turn]:
                    seed = args.seed + number
                    found = await fronts.run(mix, policy, args.seconds, seed)
                    runs[policy.name].append(found)
                    said = f"{mix.name}, seed {seed}, {policy.label}: {found.met}/{found.offered}"
                    console.print(f"{said}, waste {100 * found.waste:.0f} %", style="dim")
            cells += [RowsCell(mix, policy, tuple(runs[policy.name])) for policy in policies]
    return RowsFindings(cells, card, stretch, capacity)


def show(cells: Sequence[RowsCell], console: Console) -> None:
    """Print a row for each policy in each cell: medians, with the lowest and highest share met."""
    table = new_table(
        "cell",
        *("policy", "met %", "met/s", "waste %", "tokens/s", "focus"),
        texts=2,
        title="medians over seeds",
    )
    console.print(grouped(table, (cell.row() for cell in cells)))


def new_arguments() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    names = [mix.name for mix in mixes(1.0)]
    parser.add_argument("--cells", nargs="*", choices=names, default=[], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run, after a warm-up")
    parser.add_argument("--stretch", type=float, help="of all times; measured by default")
    parser.add_argument("--capacity", type=float, help="requests per second; measured by default")
    parser.add_argument("--seed", type=int, default=1)
    return parser


async def _main() -> int:
    parser = new_arguments()
    args = parser.parse_args()
    recording = begin(parser, args, "perf.goodput.rows", *sys.argv[1:])
    console = new_console(130)
    begun = time.monotonic()
    found = await run(args, console)
    show(found.cells, console)
    fitted = [
        Figure.of("stretch", "times as long as drawn", "", [found.stretch], better="neither"),
        Figure.of(
            "capacity",
            "capacity, before times are stretched",
            "requests/s",
            [found.capacity],
            better="neither",
        ),
    ]
    result = BenchResult(
        "goodput-rows",
        f"demo engine, {SLOTS} slots allowed",
        round(time.monotonic() - begun, 1),
        fitted + [figure for cell in found.cells for figure in cell.figures()],
    )
    triton = {"triton": find_triton(None, state_dir()).version}
    recording.save(recording.bundle([result], found.card, more_versions=triton))
    return 0


if __name__ == "__main__":
    sys.exit(status_of(_main()))
