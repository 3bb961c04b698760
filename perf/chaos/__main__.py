"""``make chaos``: kills, stops and restarts each process in turn under load.

Exits with 1 if a check fails afterwards. The seed determines the faults and their times.
"""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console

from perf.chaos import checks, soak, starts
from perf.chaos.clients import KINDS, ChaosLedger, SteadyClients
from perf.chaos.faults import (
    ROLLING_RESTART,
    Fault,
    device_faults,
    kills,
    orchestrator_faults,
    stops,
    triton_faults,
    until_whole,
)
from perf.chaos.polls import Polls
from perf.chaos.world import World, running
from perf.report.command import begin, new_console, new_parser, status_of
from perf.report.recording import Recording
from perf.report.table import new_table
from perf.stack.stack import StackSpec

SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class FaultRow:
    """Outcome of one fault."""

    fault: str
    seconds: float
    met: dict[str, int]
    """Requests met, by kind."""
    others: dict[str, int]
    """Requests with other outcomes, by kind and outcome."""
    rounds: int = 1
    out_of_service_s: float | None = None
    """Seconds from a device fault until its worker was out of service."""


def plan_of(rng: random.Random, only: str, engine: str) -> list[Fault]:
    """Every fault once, in any order, with the rolling restart last."""
    every = [f for i in (0, 1) for f in (*orchestrator_faults(i), *triton_faults(i))]
    if engine == "synthetic-paced":
        every += [fault for i in (0, 1) for fault in device_faults(i)]
    every = [fault for fault in every if only in fault.name]
    rng.shuffle(every)
    if only in ROLLING_RESTART.name:
        every.append(ROLLING_RESTART)
    return every


def plan_of_kills(rng: random.Random, count: int, still: int) -> list[Fault]:
    """``count`` kills of orchestrators, or a few more, and ``still`` stops of orchestrators."""
    seed = rng.randrange(1000)
    plan: list[Fault] = []
    for of, what, most in ((kills, "kills", count), (stops, "stops", still)):
        kinds = [fault for i in (0, 1) for fault in of(i, seed)]
        while sum(getattr(fault, what) for fault in plan) < most:
            plan.append(rng.choice(kinds))
    rng.shuffle(plan)
    return plan


async def settled(world: World) -> None:
    """Wait until every orchestrator reaches every Triton again."""
    await asyncio.sleep(SETTLE_S)
    await until_whole(world)


async def play(
    world: World,
    faults: Sequence[Fault],
    ledger: ChaosLedger,
    *,
    seed: int,
    per_kind: int,
    seconds: float = 0.0,
    roams: bool = False,
    settle: Callable[[World], Awaitable[None]] = settled,
    polls: Polls | None = None,
) -> list[FaultRow]:
    """Run ``faults`` one after the other: each once, or for ``seconds`` in total. ``settle``
    waits after each; ``roams``: see ``SteadyClients``."""
    rng = random.Random(seed)
    load = SteadyClients(world, ledger, seed, roams=roams)
    await load.start(per_kind)
    if polls is not None:
        polls.start(per_kind)
    rows: list[FaultRow] = []
    begun = time.monotonic()
    has_ended_worker = False
    try:
        number = 0
        while time.monotonic() - begun < seconds if seconds else number < len(faults):
            fault = faults[number % len(faults)]
            number += 1
            ledger.round = f"{number} {fault.name}"
            at = time.monotonic()
            if fault.ends_worker and has_ended_worker:
                await load.all_answered()
            has_ended_worker |= fault.ends_worker
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            ledger.memory_prefixes |= world.memory_prefixes()
            left_s = await fault.happen(world)
            await settle(world)
            took_s = round(time.monotonic() - at, 1)
            rows.append(FaultRow(ledger.round, took_s, {}, {}, out_of_service_s=left_s))
    finally:
        if polls is not None:
            await polls.stop()
        await load.stop()
    costs = [(row.fault, faults[i % len(faults)].costs) for i, row in enumerate(rows)]
    checks.judge_rounds(ledger, costs)
    await checks.close(world, ledger)
    return [_filled(row, ledger) for row in rows]


def _filled(row: FaultRow, ledger: ChaosLedger) -> FaultRow:
    counts = ledger.outcomes.get(row.fault, Counter())
    met = {kind: counts[kind, "met"] for kind in KINDS}
    others = {f"{kind} {what}": n for (kind, what), n in counts.items() if what != "met"}
    return replace(row, met=met, others=others)


def merged(rows: list[FaultRow]) -> list[FaultRow]:
    """Rows with all rounds of the same fault merged into one."""
    found: dict[str, FaultRow] = {}
    for row in rows:
        name = row.fault.partition(" ")[2]
        before = found.get(name) or FaultRow(name, 0.0, {}, {}, 0)
        met, others = Counter(row.met), Counter(row.others)
        met.update(before.met)
        others.update(before.others)
        seconds, rounds = round(row.seconds + before.seconds, 1), before.rounds + 1
        found[name] = FaultRow(name, seconds, dict(met), dict(others), rounds)
    return list(found.values())


def show(rows: list[FaultRow], console: Console) -> None:
    """Print requests met by kind and other outcomes of any kind."""
    table = new_table("fault", "times", "s", "out of service after, s", *KINDS, "others")
    for row in rows:
        others = ", ".join(f"{what} {count}" for what, count in row.others.items())
        met = [str(row.met[kind]) for kind in KINDS]
        left = "" if row.out_of_service_s is None else f"{row.out_of_service_s:.2f}"
        table.add_row(row.fault, str(row.rounds), f"{row.seconds:.1f}", left, *met, others)
    console.print(table)


async def _soak(seconds: float, seed: int, recording: Recording, console: Console) -> int:
    found = await soak.run(seconds, seed)
    rows, ledger = soak.rows_of(found), found.ledger
    table = new_table("part", "MiB by tenths", "growth", "files", "threads")
    for row in rows:
        rss, fds, threads = (
            " ".join(f"{value:.4g}" for value in values)
            for values in (row.rss_mib, row.fds, row.threads)
        )
        table.add_row(row.part, rss, f"{row.growth_percent:+.2f} %", fds, threads)
    console.print(table)
    outcomes = {f"{k} {what}": n for (k, what), n in ledger.outcomes.get("soak", {}).items()}
    console.print(f"{found.looks.seconds:.0f} s, {ledger.offered} requests: {outcomes}")
    facts = {
        "engine": soak.SPEC.engine,
        "seconds": round(found.looks.seconds, 1),
        "parts": rows,
        "kept_bytes": found.kept,
        "outcomes": outcomes,
        "journal": found.journal,
    }
    return saved(facts, ledger, recording, console)


def saved(
    facts: Mapping[str, object], ledger: ChaosLedger, recording: Recording, console: Console
) -> int:
    """Save the findings and faults, and print the faults; return the exit status."""
    console.print(f"{ledger.refusals} refusals; {len(ledger.faults)} faults")
    for fault in ledger.faults:
        console.print(fault, markup=False, style="red")
    counts = {
        "offered": ledger.offered,
        "durable": len(ledger.durable_ids),
        "refusals": ledger.refusals,
        "reconnects": ledger.reconnects,
        "faults": ledger.faults,
    }
    recording.save({**recording.facts(), **facts, **counts})
    return int(bool(ledger.faults))


async def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=0.0, help="run time; else each fault once")
    parser.add_argument("--kills", type=int, default=0, help="only so many kills of orchestrators")
    parser.add_argument("--starts", type=int, default=0, help="polled starts, besides --kills")
    parser.add_argument("--stops", type=int, default=None, help="besides kills (as many)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=3, help="of each kind")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--engine", choices=("torch", "synthetic-paced"), default="torch")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="run without faults")
    args = parser.parse_args()
    recording = begin(parser, args, "perf.chaos", *sys.argv[1:])
    console, ledger = new_console(160), ChaosLedger()
    if args.soak:
        return await _soak(args.soak, args.seed, recording, console)
    pids, rng = set[int](), random.Random(args.seed)
    if args.kills:
        plan = plan_of_kills(rng, args.kills, args.kills if args.stops is None else args.stops)
    else:
        plan = plan_of(rng, args.only, args.engine)
    if not plan:
        parser.error(f"--only: no fault has {args.only!r} in its name")
    async with running(StackSpec(args.engine, deterministic=True)) as world:
        polls = Polls(world, ledger)
        if args.starts:
            started = await starts.run(world, ledger, args.starts, args.kills)
            console.print(*started, sep="\n")
            return saved({"starts": started}, ledger, recording, console)
        rows = await play(
            world,
            plan,
            ledger,
            seed=args.seed,
            per_kind=args.clients,
            seconds=args.seconds,
            polls=polls,
        )
        pids |= world.pids()
        ledger.memory_prefixes |= world.memory_prefixes()
        for process in world.orchestrators:
            await process.stop(5.0)
        journal = checks.read_journals(world.journals, ledger)
    await asyncio.sleep(0.5)
    checks.judge_leaks(pids, ledger)
    played = [plan[i % len(plan)] for i in range(len(rows))]
    if args.kills:
        rows = merged(rows)
    show(rows, console)
    facts = {
        "engine": args.engine,
        "clients": args.clients * len(KINDS),
        "orchestrator_kills": sum(fault.kills for fault in played),
        "orchestrator_stops": sum(fault.stops for fault in played),
        "polls": polls.polled,
        "journal": asdict(journal),
        "rows": rows,
    }
    return saved(facts, ledger, recording, console)


if __name__ == "__main__":
    sys.exit(status_of(_main()))
