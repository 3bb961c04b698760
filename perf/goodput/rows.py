"""``make bench-rows``: how many rows run at once, on the demo engine.

    python -m perf.goodput.rows [--timed] [--cells NAME …] [--seeds N] [--seconds S]
                                [--stretch TIMES] [--capacity PER_S]

All of it takes an hour. Cells of ``perf.load.cells`` with 64 slots allowed. Policies take turns
within each cell and seed, so that what else the machine does falls on all alike: ours, ours with 16
rows, and first come, first served with 64 and with 16. Everybody's clients hang up at their
deadlines. 16 rows are another Triton's, whose worker has that many slots.

With ``--timed`` the demo engine's steps are waited for instead of computed (``synthetic-paced``),
as long as its were on a machine that nobody else used. All around it is real, as ever. A machine
whose speed changes by half from one minute to the next, as those of clouds do, then says the same
of a policy each time; and the CPU is not the engine's, as it is not with a GPU.

Machines differ, so the cells are fitted to this one first. All times of a cell are ``--stretch``
times as long as they were drawn: by default what a token takes here, where one answer runs alone,
over ``TOKEN_MS``; with ``--timed`` twice, steps included, so that two cores have time for the rest.
``--capacity``, in requests per second before they are stretched, is by default the rate at which
first come, first served still meets 95 % of the cell ``capacity``.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final, NamedTuple

from rich.console import Console

from catalog.paths import state_dir
from orchestrator.tasks.job import Priority
from perf.goodput.front import Front, fronts
from perf.goodput.policies import FIXED_ROWS, HANG_UP, OURS, Policy
from perf.load.cells import CAP_TOKENS, DEMO_COST, FACT_TOKENS, TOKEN_MS, CellRequest, Mix, mixes
from perf.load.chats import PATH, chat, story
from perf.load.drive import PATH as COMPLETIONS
from perf.load.drive import completion
from perf.load.lane import open_lane
from perf.load.open_loop import StreamRequest
from perf.load.outcomes import Cell, Turn, show_cells
from perf.load.words import QUESTIONS, THINGS
from perf.report.bundle import BenchResult, Figure
from perf.report.command import begin, new_console, new_parser, status_of
from perf.report.stats import median
from perf.stack.stack import StackSpec, tritons
from pool.engines.triton import find_triton
from protocol import ModelCard
from worker.runner.synthetic import length_ids

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
_WARM_S = 4.0
_ALONE = 5
"""Number of answers that run one after the other to tell how fast the machine is."""
_MIN_STRETCH = 0.5
_SLOWEST_PER_S, _FASTEST_PER_S, _FASTER = 8.0, 60.0, 1.2
"""Rates tried for the capacity, in requests per second: lowest, highest, and the factor between."""
_CAPACITY_MET = 0.95
_WORDS_PER_TOKEN = 0.75
TIMED_STRETCH = 2.0
_FIRST_ID, _KINDS, _OPENING_TOKENS = 16, 61, 8
"""Ids of prompts by kind: the first of them, how many, and how often one comes."""
_FRESH = random.Random()


class Requests(NamedTuple):
    """The model that is served, and how it is asked: by chats, or with ``timed`` by token ids."""

    card: ModelCard
    timed: bool = False

    @property
    def path(self) -> str:
        return COMPLETIONS if self.timed else PATH

    def asks(self, mix: Mix, seconds: float, seed: int) -> list[StreamRequest]:
        """Requests of the cell; the engine ends answers by itself, about as long as is wished."""
        rng = random.Random(seed)
        requests = mix.requests(seconds, seed)
        return [StreamRequest(w.at_s, w.deadline_ms, self.body(w, rng)) for w in requests]

    def body(self, request: CellRequest, rng: random.Random) -> dict[str, object]:
        body = (
            _ids_body(request, self.card)
            if self.timed
            else _chat_body(request, self.card.model, rng)
        )
        return body | {"tenant": request.tenant, "priority": request.priority.value}


def _ids_body(request: CellRequest, card: ModelCard) -> dict[str, object]:
    """Body of a prompt whose last ids tell its length to the engine, and whose first ones are those
    of its kind, as chats of a kind begin with the same words."""
    opening = [_FIRST_ID + sum(request.kind.encode()) % _KINDS] * _OPENING_TOKENS
    ids = range(_FIRST_ID + _KINDS, card.vocab_size)
    own = _FRESH.choices(ids, k=max(0, request.prompt_tokens - _OPENING_TOKENS - 2))
    prompt = [*opening, *own, *length_ids(request.answer_tokens)]
    return completion(card.model, CAP_TOKENS, prompt) | {"ignore_eos": False}


def _chat_body(request: CellRequest, model: str, rng: random.Random) -> dict[str, object]:
    is_fact = request.answer_tokens < FACT_TOKENS
    text = rng.choice(QUESTIONS) if is_fact else story(rng)
    if request.prompt_tokens > 1000:
        # New ones each time, whatever the seed: no policy may find in a worker's cache what was
        # computed for the one before it.
        pages = _FRESH.choices(THINGS, k=int(_WORDS_PER_TOKEN * request.prompt_tokens))
        text = f"{' '.join(pages)}. {text}"
    return chat(model, text, max_tokens=CAP_TOKENS, seed=rng.randrange(2**31))


class RowsBench(NamedTuple):
    """Orchestrators by policy, and what they serve; ``stretch`` as in ``--stretch``."""

    fronts: dict[str, Front]
    served: Requests
    stretch: float = 1.0

    async def run(self, mix: Mix, policy: Policy, seconds: float, seed: int) -> Turn:
        """Run a policy for ``seconds`` times the stretch, after a warm-up."""
        mix = mix.stretched(self.stretch)
        warm_s, seconds = self.stretch * _WARM_S, self.stretch * seconds
        asks = self.served.asks(mix, warm_s + seconds, seed)
        most_s = max(ask.deadline_ms for ask in asks) / 1000 + 0.25
        results = await self.fronts[policy.name].offer(self.served.path, asks, most_s)
        kinds = [request.kind for request in mix.requests(warm_s + seconds, seed)]
        return Turn.of(asks, results, warm_s, seconds, kinds)

    async def token_ms(self, policy: Policy) -> float:
        """Median time of a token in ms where one answer runs alone, the first token left out."""
        found = []
        for number in range(_ALONE):
            request = CellRequest(
                0.0, "stories", 0, FACT_TOKENS, 60_000.0, "all", Priority.INTERACTIVE
            )
            body = self.served.body(request, random.Random(number))
            ask = StreamRequest(0.0, request.deadline_ms, body)
            (result,) = await self.fronts[policy.name].offer(self.served.path, [ask], 60.0)
            found.append(1000 * (result.end_s - result.first_s) / max(1, result.tokens - 1))
        return median(found)

    async def capacity_per_s(self, policy: Policy, seconds: float, seed: int) -> float:
        """Rate at which ``policy`` meets 95 % of the cell ``capacity``.

        Between the highest rate tried at which it meets that and the next one, as if the share fell
        evenly: else ``twice`` would be as little as 1.7 times the capacity.
        """
        held = per_s = _SLOWEST_PER_S
        met = 1.0
        while per_s < _FASTEST_PER_S:
            mix = next(mix for mix in mixes(per_s) if mix.name == "capacity")
            share = (await self.run(mix, policy, seconds, seed)).attainment()
            if share < _CAPACITY_MET:
                return per_s - (per_s - held) * (_CAPACITY_MET - share) / (met - share)
            held, met, per_s = per_s, share, per_s * _FASTER
        return held


class RowsFindings(NamedTuple):
    """Findings of a run; ``capacity`` is in requests per second before they are stretched."""

    cells: list[Cell]
    card: ModelCard
    stretch: float
    capacity: float


async def run(args: argparse.Namespace, console: Console) -> RowsFindings:
    """Run all cells; within a seed the policies in turns, another one first each time."""
    cells: list[Cell] = []
    async with AsyncExitStack() as stack:
        addresses: dict[int, list[str]] = {}
        for slots in (SLOTS, FEWER):
            (triton,) = await stack.enter_async_context(tritons(_spec(slots, args), 1))
            addresses[slots] = [triton.grpc_address]
        async with open_lane(addresses[SLOTS][0]) as lane:
            card = lane.card
        served = [(policy, addresses[slots]) for policy, slots in POLICIES]
        ready = await stack.enter_async_context(fronts(served))
        bench = RowsBench(ready, Requests(card, args.timed))
        policies = [policy for policy, _ in POLICIES]
        for policy in policies:  # what a cold start does is another question
            await bench.run(mixes(_SLOWEST_PER_S)[0], policy, 2.0, args.seed - 1)
        stretch = args.stretch or await _stretch(bench, args)
        bench = bench._replace(stretch=stretch)
        capacity = args.capacity or await bench.capacity_per_s(_FIFO, args.seconds, args.seed)
        console.print(f"times {stretch:.2f} as long, capacity {capacity:.1f}/s before", style="dim")
        for mix in mixes(capacity):
            if args.cells and mix.name not in args.cells:
                continue
            runs: dict[str, list[Turn]] = {policy.name: [] for policy in policies}
            for number in range(args.seeds):
                turn = number % len(policies)
                for policy in policies[turn:] + policies[:turn]:
                    seed = args.seed + number
                    found = await bench.run(mix, policy, args.seconds, seed)
                    runs[policy.name].append(found)
                    said = f"{mix.name}, seed {seed}, {policy.label}: {found.line()}"
                    console.print(f"{said}, waste {100 * found.waste:.0f} %", style="dim")
            cells += [cell_of(mix, policy, runs[policy.name]) for policy in policies]
    return RowsFindings(cells, card, stretch, capacity)


def _spec(slots: int, args: argparse.Namespace) -> StackSpec:
    """The worker: the demo engine, or its steps' times."""
    if not args.timed:
        return StackSpec("torch", max_running=slots)
    times_ms = 1000 * (args.stretch or TIMED_STRETCH)
    return StackSpec(
        "synthetic-paced",
        step_ms=times_ms * DEMO_COST.step_s,
        row_ms=times_ms * DEMO_COST.row_s,
        prompt_token_ms=times_ms * DEMO_COST.prompt_token_s,
        lengths="prompt",
        max_running=slots,
    )


async def _stretch(bench: RowsBench, args: argparse.Namespace) -> float:
    """How many times as long as drawn all times of the cells are, where nobody says it."""
    if args.timed:
        return TIMED_STRETCH
    return max(_MIN_STRETCH, await bench.token_ms(_FIFO) / TOKEN_MS)


def cell_of(mix: Mix, policy: Policy, turns: Sequence[Turn]) -> Cell:
    """Cell of one policy over all seeds."""
    kinds = [mix.focus] if mix.focus else []
    load = f"{mix.name}, {mix.per_s:g}/s"
    return Cell(f"{mix.name}.{policy.name}", load, policy.label, turns, kinds)


def new_arguments() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    names = [mix.name for mix in mixes(1.0)]
    parser.add_argument("--cells", nargs="*", choices=names, default=[], metavar="NAME")
    parser.add_argument("--timed", action="store_true", help="wait for steps, compute none")
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
    show_cells(found.cells, console)
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
        f"demo engine{', timed' if args.timed else ''}, {SLOTS} slots allowed",
        round(time.monotonic() - begun, 1),
        fitted + [figure for cell in found.cells for figure in cell.figures()],
    )
    triton = {"triton": find_triton(None, state_dir()).version}
    recording.save(recording.bundle([result], found.card, more_versions=triton))
    return 0


if __name__ == "__main__":
    sys.exit(status_of(_main()))
