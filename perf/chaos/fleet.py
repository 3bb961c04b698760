"""``python -m perf.chaos.fleet``: orchestrators that share a Redis, in front of two Tritons. The
run kills and stops them in turn; clients reconnect to any orchestrator.

Exits with 1 unless every promised durable task has one end, with the text of an undisturbed run,
and each of its events reached its client once and in order. No orchestrator may report it as gone,
or make clients wait for a stopped orchestrator.
"""

import asyncio
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from perf.chaos import checks
from perf.chaos.__main__ import merged, play, saved, show
from perf.chaos.clients import KINDS, ChaosLedger
from perf.chaos.faults import (
    DIES,
    Fault,
    kill_process,
    stand_still,
    start_process,
    triton_kills,
    until_whole,
)
from perf.chaos.polls import Polls
from perf.chaos.world import World, orchestrating
from perf.report.command import begin, new_console, new_parser, status_of
from perf.stack.stack import StackSpec, alive, tritons
from perf.stack.store import StoreServer, store_program, store_server

ORCHESTRATORS = 3
LEASE_S = 2.0
TASK_WITHIN_S = LEASE_S + 1.5
"""Maximum wait for the state of a durable task: a lease, two renewals to detect its end, and a
second of margin."""
STILL_S = 2 * LEASE_S
"""Seconds of an orchestrator's stop, in which the others take over its tasks."""
SLOW_S = 1.0
"""Seconds of the store's stop: too short for any lease to expire."""
AWAY_S = 1.5
SETTLE_S = LEASE_S + 1.0


@dataclass(frozen=True, slots=True)
class FleetWorld:
    """Running processes, with the store that the orchestrators share."""

    world: World
    store: StoreServer


@asynccontextmanager
async def running(
    spec: StackSpec, program: str, count: int = ORCHESTRATORS
) -> AsyncIterator[FleetWorld]:
    """Run a store, two Tritons and the orchestrators."""
    with tempfile.TemporaryDirectory(prefix="tidegate-chaos-") as folder:
        async with store_server(program, Path(folder)) as store, tritons(spec, 2) as instances:
            env = {"TIDEGATE_STATE__URL": store.url, "TIDEGATE_JOURNAL__PATH": ""}
            constants = {"orchestrator.state.connection.LEASE_S": LEASE_S}
            addresses = [[one.grpc_address for one in instances]] * count
            async with orchestrating(addresses, env, constants=constants) as (orchestrators, _):
                yield FleetWorld(World(instances, orchestrators, ()), store)


def faults_of(fleet: FleetWorld, number: int) -> list[Fault]:
    """Faults of one orchestrator."""
    process = fleet.world.orchestrators[number]

    async def die(world: World) -> None:
        await kill_process(process)
        await start_process(process)

    async def pause(world: World) -> None:
        await stand_still(world, alive(process.pid), STILL_S)

    name = f"orchestrator {number}"
    return [
        Fault(f"kill -9 {name}", DIES, die, 1),
        # Work that continues there without a client may be given up.
        Fault(f"SIGSTOP {name}, {STILL_S:g} s", DIES, pause, stops=1),
    ]


def store_faults(fleet: FleetWorld) -> list[Fault]:
    """Faults of the store. They may only delay durable work."""

    async def restart(world: World) -> None:
        await fleet.store.kill()
        await asyncio.sleep(AWAY_S)
        await fleet.store.start()

    async def pause(world: World) -> None:
        fleet.store.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(SLOW_S)
        finally:
            fleet.store.signal(signal.SIGCONT)

    nothing = frozenset[str]()
    return [
        Fault(f"kill -9 the store, back after {AWAY_S:g} s", nothing, restart),
        Fault(f"SIGSTOP the store, {SLOW_S:g} s", nothing, pause),
    ]


def plan_of(fleet: FleetWorld, rng: random.Random, kills: int, stops: int) -> list[Fault]:
    """Faults in random order, with ``kills`` and ``stops`` of orchestrators among them."""
    count = len(fleet.world.orchestrators)
    plan = store_faults(fleet)
    for number in range(len(fleet.world.tritons)):
        plan += triton_kills(number)
    plan += [faults_of(fleet, at % count)[0] for at in range(kills)]
    plan += [faults_of(fleet, at % count)[1] for at in range(stops)]
    rng.shuffle(plan)
    return plan


async def settled(world: World) -> None:
    """Wait until dead processes were noticed, their tasks taken over, and all are up again."""
    await asyncio.sleep(SETTLE_S)
    await until_whole(world)


async def judge_store(store: StoreServer, ledger: ChaosLedger) -> dict[str, int]:
    """Check that each promised durable task has an end in the store."""
    promised = Counter(ledger.durable_ids)
    if doubled := [one for one in promised if promised[one] > 1]:
        ledger.faults.append(f"afterwards: {len(doubled)} task ids were given twice")
    open_, unknown = 0, 0
    async with store.client() as client:
        for task_id in promised:
            record = await client.hgetall(f"{{tidegate}}:task:{task_id}")
            unknown += not record
            open_ += bool(record) and b"end" not in record
        held = [await client.scard(name) async for name in client.scan_iter("*held:*")]
    if unknown:
        ledger.faults.append(f"afterwards: {unknown} durable tasks are not in the store")
    if open_ or sum(held):
        ledger.faults.append(f"afterwards: {max(open_, sum(held))} durable tasks have no end")
    return {"tasks": len(promised), "open": open_, "unknown": unknown}


async def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--orchestrators", type=int, default=ORCHESTRATORS)
    parser.add_argument("--kills", type=int, default=6, help="kills of orchestrators")
    parser.add_argument("--stops", type=int, default=None, help="stops (as many as kills)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=2, help="of each kind")
    args = parser.parse_args()
    recording = begin(parser, args, "perf.chaos.fleet", *sys.argv[1:])
    console, ledger, pids = new_console(160), ChaosLedger(), set[int]()
    stops = args.kills if args.stops is None else args.stops
    program = store_program()
    if program is None:
        parser.error("needs redis-server or valkey-server: apt-get install redis-server")
    spec = StackSpec("synthetic-paced", step_ms=10.0)
    async with running(spec, program, args.orchestrators) as fleet:
        plan = plan_of(fleet, random.Random(args.seed), args.kills, stops)
        polls = Polls(fleet.world, ledger, task_within_s=TASK_WITHIN_S)
        rows = await play(
            fleet.world,
            plan,
            ledger,
            seed=args.seed,
            per_kind=args.clients,
            roams=True,
            settle=settled,
            polls=polls,
        )
        pids |= fleet.world.pids()
        ledger.memory_prefixes |= fleet.world.memory_prefixes()
        stored = await judge_store(fleet.store, ledger)
    await asyncio.sleep(0.5)
    checks.judge_leaks(pids, ledger)
    rows = merged(rows)
    show(rows, console)
    facts = {
        "clients": args.clients * len(KINDS),
        "orchestrators": args.orchestrators,
        "lease_s": LEASE_S,
        "orchestrator_kills": sum(fault.kills for fault in plan),
        "orchestrator_stops": sum(fault.stops for fault in plan),
        "polls": polls.polled,
        "store": stored,
        "rows": rows,
    }
    return saved(facts, ledger, recording, console)


if __name__ == "__main__":
    sys.exit(status_of(_main()))
