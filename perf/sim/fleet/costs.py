"""CPU that the size of a fleet takes: placing a request, hearing of an instance, renewing a lease.

The real orchestrator in front of simulated instances (``perf.sim.simulate``), as busy as makes it
look at all of them; and the real renewal at a Redis or Valkey server that is started for it, among
members which tell as much as this one.

    python -m perf.sim.fleet.costs [--instances 40 1000] [--members 4 100]
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace as changed
from rich.table import Table

from orchestrator.instances.registry import Registry
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.state.connection import Names, StateConfig
from orchestrator.state.members import RENEW_S, Member, Members
from orchestrator.state.shares import SlotShares
from orchestrator.state.tasks import SharedTasks
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from perf import SEED
from perf.report.bundle import BenchResult, Figure
from perf.report.command import Skip, begin, new_console, new_parser, result
from perf.sim.arrivals import SimArrival
from perf.sim.loop import VirtualClock, VirtualLoop, run_quietly
from perf.sim.simulate import Fleet, new_job, new_orchestrator
from perf.sim.worker import WorkerSpec
from perf.stack.store import store_program, store_server
from worker.runner.synthetic import StepCost

_SPEC = WorkerSpec(StepCost(10e-3, 0.5e-3, 0.1e-3), slots=8, kv_tokens=8 * 2048)
_SETTINGS = {"QUEUE__MAX_WAITING": "-1", "DISPATCH__ROW_POLICY": "fixed"}
_LONG = 3500
"""Tokens of an answer that nobody waits for here."""
_SAMPLES, _CALLS = 20, 5
_RENEWALS = 12


async def orchestrator_costs(loop: VirtualLoop, instances: int) -> tuple[Registry, list[Figure]]:
    """Figures of an orchestrator in front of so many instances, a tenth of their slots taken."""
    clock = VirtualClock(loop)
    parts, _ = new_orchestrator(Fleet(_SPEC, instances), clock, _SETTINGS, random.Random(SEED))
    parts.lifecycle.start()
    await asyncio.sleep(1.0)
    orchestrator, placer = parts.orchestrator, parts.placer
    registry = orchestrator.stages.registry
    rng = random.Random(SEED)
    submits, task = [], None
    for number in range(max(_SAMPLES, instances * _SPEC.slots // 10)):
        arrival = SimArrival(
            clock.now(), rng.randrange(8, 256), _LONG, _LONG, 6e5, "", Priority.INTERACTIVE
        )
        job, prompt = new_job(arrival, clock.now(), arrival.deadline_ms)
        begun = time.perf_counter()
        task = await orchestrator.submit(job, prompt)
        submits.append(1e3 * (time.perf_counter() - begun))
        if number % 32 == 31:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    assert task is not None
    chosen = task
    timed = {
        "report": lambda: registry.changed(topology=False),
        "view": placer.refresh,
        "choose": lambda: placer.choose(chosen),
    }
    said = {
        "submit": "a request, from its offer until it is sent",
        "report": "an instance's report while nothing waits",
        "view": "the view of all instances, read again",
        "choose": "the choice of an instance",
    }
    times = {"submit": submits[-_SAMPLES:]} | {name: _times(of) for name, of in timed.items()}
    await parts.lifecycle.drain(0.0)
    await parts.lifecycle.close()
    return registry, [
        Figure.of(f"{instances}.{name}_ms", f"{said[name]}, {instances} instances", "ms", times[name])
        for name in said
    ]


def _times(call: Callable[[], object]) -> list[float]:
    """Milliseconds of ``call``, after one that does not count."""
    call()
    taken = []
    for _ in range(_SAMPLES):
        begun = time.perf_counter()
        for _ in range(_CALLS):
            call()
        taken.append(1e3 * (time.perf_counter() - begun) / _CALLS)
    return taken


async def renewal_costs(registry: Registry, instances: int, members: int) -> list[Figure]:
    """Figures of one member's renewals among ``members`` in all."""
    program = store_program()
    if program is None:
        raise Skip("needs redis-server or valkey-server (apt-get install redis-server)")
    with tempfile.TemporaryDirectory() as folder:
        async with store_server(program, Path(folder)) as server, server.client() as client:
            config = StateConfig(server.url, "costs", lease_s=60.0)
            one = Members(config, SharedTasks(config, f"{0:08x}"), time.time)
            queue: TaskQueue[Task] = TaskQueue(-1)
            SlotShares(one, f"{0:08x}", registry, queue)
            names = Names(config.prefix)
            for number in range(1, members):
                other = Member(f"http://10.0.0.{number}:8081", "", 0.0, one.describe())
                tag = f"{number:08x}"
                await client.hset(names.members, tag, msgspec.json.encode(other))  # type: ignore[misc]
                await client.set(names.alive(tag), "1")
            before, busy_s = await client.info(), time.process_time()
            one.start("http://10.0.0.0:8081", "")
            limit_s = 60.0 + 4 * _RENEWALS
            async with asyncio.timeout(limit_s):
                while one.renewals <= _RENEWALS:
                    await asyncio.sleep(RENEW_S / 5)
            busy_s = time.process_time() - busy_s
            count = one.renewals
            after = await client.info()
            await one.leave()

    def each(name: str, scale: float) -> float:
        return scale * (float(after[name]) - float(before[name])) / count

    store_ms = each("used_cpu_user", 1e3) + each("used_cpu_sys", 1e3)
    what = f"{members} orchestrators, {instances} instances"
    key = f"{instances}x{members}"
    of = Figure.of
    return [
        of(f"{key}.renewal_ms", f"a renewal's CPU here, {what}", "ms", [1e3 * busy_s / count]),
        of(f"{key}.renewal_store_ms", f"a renewal's CPU at the store, {what}", "ms", [store_ms]),
        of(
            f"{key}.renewal_kb",
            f"a renewal's answer, {what}",
            "kB",
            [each("total_net_output_bytes", 1e-3)],
        ),
        of(
            f"{key}.store_cores",
            f"the store's cores that all renewals take, {what}",
            "cores",
            [store_ms / 1e3 * members / RENEW_S],
        ),
    ]


def measure(instances: Sequence[int], members: Sequence[int]) -> list[BenchResult]:
    """All results; one that fails ends only itself."""
    results: list[BenchResult] = []
    for count in instances:
        registries: list[Registry] = []
        with result(results, f"orchestrator-{count}", f"in front of {count} instances") as figures:
            registry, found = run_quietly(lambda loop, n=count: orchestrator_costs(loop, n))  # type: ignore[misc]
            registries.append(registry)
            figures += found
        for others in members if registries else ():
            name = f"renewal-{count}x{others}"
            with result(results, name, f"a lease among {others} orchestrators") as figures:
                figures += asyncio.run(renewal_costs(registries[0], count, others))
    return results


def new_arguments() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=[40, 1000])
    parser.add_argument("--members", type=int, nargs="+", default=[4, 100])
    return parser


def main() -> int:
    parser = new_arguments()
    args = parser.parse_args()
    recording = begin(parser, args, "perf.sim.fleet.costs", *sys.argv[1:])
    results = measure(args.instances, args.members)
    table = Table(title="median, lowest … highest", title_justify="left")
    table.add_column("what")
    table.add_column("", justify="right")
    for each in results:
        for figure in each.figures:
            shown = f"{figure.median:.3g} ({figure.low:.3g} … {figure.high:.3g}) {figure.unit}"
            table.add_row(figure.label, shown)
        if each.failed or each.skipped:
            table.add_row(each.what, each.failed or each.skipped)
    new_console().print(table)
    recording.save(changed(recording.bundle(results), engine="sim", model="sim"))
    return int(any(each.failed for each in results))


if __name__ == "__main__":
    sys.exit(main())
