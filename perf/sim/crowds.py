"""Crowds: simultaneous requests, as in a new user's first test (DL-7, DL-15).

``equal``: 8 to 96 equal requests at once, with a deadline that only some of them can meet. They are
sent six times, to a service that has just started or has served small requests of another kind.
Rivals run with the number of rows that is best for them.

``newcomers``: requests with a deadline of two to six times their own service time, behind others
with a deadline of a minute.

``memory``: newcomers with long prompts, behind others with a minute that fill the rows and the KV
memory, so that no job can be paused.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from orchestrator.tasks.job import Priority
from perf.load.cells import DEMO_COST
from perf.report.bundle import Figure
from perf.sim.arrivals import SimArrival
from perf.sim.replay.worker import WorkerSpec
from perf.sim.rivals.fleet import EngineFigures, RivalFleet
from perf.sim.rivals.policies import RIVALS
from perf.sim.scenes import FLEET, UNBOUNDED
from perf.sim.simulate import Fleet, simulate
from perf.sim.study import Case
from protocol import Outcome

ROUNDS, EVERY_S = 6, 5.0
TOKENS, EQUAL_MS = 150, 1000.0
SOON_MS = 50.0
_MINUTE_MS = 60_000.0
_WARM = 24
_LONG = 400
"""Prompt tokens of the requests that fill the memory."""
_ANSWER = 64
_FEW_ROWS = (8, 12, 16, 20, 24, 32, 48)
_RIVALS = ("fifo", "edf", "qoserve")
_CROWDS = ("equal", "newcomers", "memory")


class Count:
    """Outcomes of the requests that count."""

    def __init__(self) -> None:
        self.met = self.unmet = self.told_soon = 0

    def add(self, *, met: bool, told_ms: float) -> None:
        self.met += met
        self.unmet += not met
        self.told_soon += not met and told_ms <= SOON_MS


def asked(
    at_s: float,
    number: int,
    tokens: int,
    deadline_ms: float,
    kind: str,
    cap: int,
    prompt_tokens: int = 24,
) -> SimArrival:
    """One request; its answer is ``tokens`` long, of which its client knows ``cap``."""
    return SimArrival(
        at_s=at_s + 1e-5 * number,
        prompt_tokens=prompt_tokens,
        max_tokens=cap,
        length=tokens,
        deadline_ms=deadline_ms,
        tenant="",
        priority=Priority.INTERACTIVE,
        kind=kind,
    )


def equal_bursts(many: int, *, has_served: bool) -> list[SimArrival]:
    """The rounds, after some requests that are not counted."""
    few = [
        asked(0.1 + 0.05 * n, n, 12, 2000.0, "other", 16) for n in range(_WARM if has_served else 4)
    ]
    rounds = itertools.product(range(ROUNDS), range(many))
    return few + [
        asked(3.0 + EVERY_S * at, n, TOKENS, EQUAL_MS, "counted", TOKENS) for at, n in rounds
    ]


def newcomers(behind: int, many: int, deadline_ms: float, *, stated: bool) -> list[SimArrival]:
    """``many`` requests that come while ``behind`` others with a minute run or wait."""
    cap = TOKENS if stated else 2 * TOKENS
    few = [asked(0.1 + 0.1 * n, n, TOKENS, 5000.0, "other", cap) for n in range(_WARM)]
    others = [asked(4.0, n, 2 * TOKENS, _MINUTE_MS, "other", 2 * TOKENS) for n in range(behind)]
    return (
        few
        + others
        + [asked(4.5, behind + n, TOKENS, deadline_ms, "counted", cap) for n in range(many)]
    )


def behind_full_memory(
    behind: int, many: int, deadline_ms: float, after_s: float
) -> list[SimArrival]:
    """``many`` requests that come ``after_s`` after ``behind`` others with a minute."""
    few = [asked(0.3 * n, n, 24, _MINUTE_MS, "", 24, 64 + 32 * (n % 20)) for n in range(120)]
    others = [asked(60.0, n, _ANSWER, _MINUTE_MS, "other", _ANSWER, _LONG) for n in range(behind)]
    at_s = 60.0 + after_s
    return (
        few
        + others
        + [asked(at_s, n, _ANSWER, deadline_ms, "counted", _ANSWER, _LONG) for n in range(many)]
    )


def run_ours(arrivals: Sequence[SimArrival], fleet: Fleet, seed: int) -> Count:
    count = Count()
    run = simulate(arrivals, fleet, UNBOUNDED, seed=seed, linger_s=70.0)
    for result in run.results:
        if result.arrival.kind == "counted":
            is_refused = result.outcome is Outcome.REFUSED
            told_ms = 1000 * (result.ended_s - result.arrival.at_s) if is_refused else _MINUTE_MS
            count.add(met=result.met, told_ms=told_ms)
    return count


def run_rival(
    name: str, rows: int, arrivals: Sequence[SimArrival], fleet: Fleet, seed: int
) -> Count:
    cost, count = fleet.spec.cost, Count()
    spec = WorkerSpec(cost, rows, fleet.spec.kv_tokens)
    machine = EngineFigures(rows, cost.prompt_token_s, cost.step_s + cost.row_s * rows)
    _, rival = RIVALS[name]
    for job in RivalFleet(spec, fleet.count, rival(machine), seed).run(arrivals):
        if job.arrival.kind == "counted":
            count.add(met=job.met, told_ms=_MINUTE_MS)
    return count


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--crowds", nargs="+", choices=_CROWDS, default=list(_CROWDS))


def cases(args: argparse.Namespace) -> Iterator[Case]:
    seeds = range(1, args.seeds + 1)
    fleet = Fleet(WorkerSpec(DEMO_COST, 64, 64 * 2048), 1)
    if "equal" in args.crowds:
        for many, has_served in itertools.product((8, 16, 32, 48, 64, 96), (False, True)):
            key = f"equal.{many}.{'served' if has_served else 'fresh'}"
            arrivals = partial(equal_bursts, many, has_served=has_served)
            yield _case(key, arrivals, fleet, seeds, ("fifo",), _FEW_ROWS)
    if "newcomers" in args.crowds:
        cells: Iterable[tuple[int, int, int, int, int, bool]] = itertools.product(
            (1, 2, 4), (8, 32, 64), (0, 32, 96), (1, 32), (2, 4, 6), (True, False)
        )
        for count, rows, behind, many, times, stated in cells:
            cost = DEMO_COST
            alone_ms = 1000 * TOKENS * (cost.step_s + cost.row_s * min(rows, many))
            lengths = "stated" if stated else "open"
            key = f"newcomers.{count}x{rows}.{many}_behind_{behind}.{times}x.{lengths}"
            arrivals = partial(newcomers, behind, many, times * alone_ms, stated=stated)
            cell = Fleet(WorkerSpec(cost, rows, 64 * 2048), count)
            yield _case(key, arrivals, cell, seeds, _RIVALS, (rows,))
    if "memory" in args.crowds:
        full = itertools.product((48, 80), (2.4, 4.8, 7.0), (0.1, 0.5, 1.5, 3.0))
        for behind, deadline_s, after_s in full:
            key = f"memory.32_behind_{behind}.{deadline_s}s.after_{after_s}s"
            arrivals = partial(behind_full_memory, behind, 32, 1000 * deadline_s, after_s)
            yield _case(key, arrivals, FLEET, seeds, _RIVALS, (FLEET.spec.slots,))


def _case(
    key: str,
    arrivals: Callable[[], list[SimArrival]],
    fleet: Fleet,
    seeds: Iterable[int],
    rivals: Sequence[str],
    rows: Sequence[int],
) -> Case:
    def figures() -> list[Figure]:
        asked = arrivals()
        ours = [run_ours(asked, fleet, seed) for seed in seeds]
        met = {
            name: max(run_rival(name, each, asked, fleet, 1).met for each in rows)
            for name in rivals
        }
        soon = [one.told_soon / one.unmet for one in ours if one.unmet]
        of, label = Figure.of, f"of the others told within {SOON_MS:g} ms"
        return [
            of(f"{key}.met", "Tidegate", "met", [float(one.met) for one in ours], better="higher"),
            *(of(f"{key}.{name}", RIVALS[name][0], "met", [float(n)]) for name, n in met.items()),
            *([of(f"{key}.soon", label, "", soon)] if soon else []),
        ]

    return Case(key, key, figures)
