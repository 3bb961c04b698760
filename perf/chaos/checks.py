"""Checks after the load has ended, which must hold after any faults."""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.chaos.clients import ChaosLedger
from perf.chaos.world import World
from perf.load.connection import HOST
from perf.stack.scrape import scrape
from pool.process.proc import is_running

_QUIET_S = 20.0
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """Total counts over all journals."""

    tasks: int
    ended: int
    outcomes: dict[str, int]


def judge_rounds(ledger: ChaosLedger, costs: Sequence[tuple[str, frozenset[str]]]) -> None:
    """Check each round: every request is met, or has an outcome that the fault allows. The effects
    of a kill may appear one round later."""
    before = frozenset[str]()
    for name, cost in costs:
        for (kind, outcome), count in ledger.outcomes.get(name, Counter()).items():
            if outcome not in cost | before | {"met"}:
                ledger.faults.append(f"{name}: {count} {kind} requests came to {outcome}")
        before = cost


async def close(world: World, ledger: ChaosLedger) -> None:
    """Wait until nothing runs, and record counts that do not balance."""
    ends_at = asyncio.get_running_loop().time() + _QUIET_S
    while True:
        wrong = [
            f"{one.url}: {what}"
            for one in world.orchestrators
            for what in (await scrape(HOST, one.port)).unbalanced()
        ]
        if not wrong:
            return
        if asyncio.get_running_loop().time() > ends_at:
            ledger.faults += [f"afterwards: {what}" for what in wrong]
            return
        await asyncio.sleep(0.2)


def read_journals(paths: Sequence[Path], ledger: ChaosLedger) -> JournalFacts:
    """Check that each durable task that was promised has exactly one terminal record."""
    records: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    ended = 0
    for path in paths:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            for task_id, ended_unix, outcome in db.execute(
                "SELECT id, ended_unix, outcome FROM tasks"
            ):
                records[task_id] += 1
                ended += ended_unix is not None
                outcomes[outcome or "open"] += 1
        db.close()
    promised = Counter(ledger.durable_ids)
    if lost := promised.keys() - records.keys():
        ledger.faults.append(f"afterwards: {len(lost)} durable tasks are in no journal")
    if doubled := [one for one in records if records[one] > 1]:
        ledger.faults.append(f"afterwards: {len(doubled)} durable tasks are in two journals")
    if doubled := [one for one in promised if promised[one] > 1]:
        ledger.faults.append(f"afterwards: {len(doubled)} task ids were given twice")
    if ended != records.total():
        ledger.faults.append(f"afterwards: {records.total() - ended} durable tasks have no end")
    return JournalFacts(records.total(), ended, dict(outcomes))


def judge_leaks(pids: set[int], ledger: ChaosLedger) -> None:
    """Check that no process or shared memory is left; call it after everything was stopped."""
    if alive := [pid for pid in pids if is_running(pid)]:
        ledger.faults.append(f"afterwards: processes are left: {alive}")
    regions = [entry.name for entry in _SHM.iterdir()] if _SHM.is_dir() else []
    if left := [name for name in regions if name.startswith(tuple(ledger.memory_prefixes))]:
        ledger.faults.append(f"afterwards: shared memory is left: {left[:5]}")
