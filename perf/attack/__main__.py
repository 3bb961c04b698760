"""``make attack``: every attack on a stack of its own, for as long as asked, and a table.

Exits with 1 when something was found that must not be.
"""

import random
import secrets
import sys
from dataclasses import dataclass

from rich.console import Console

from catalog.paths import state_dir
from perf.attack import attacks, triton_attacks
from perf.attack.checks import HealthProbe, StateChecks
from perf.attack.target import Budget, Tally, Target
from perf.load.connection import HOST
from perf.report.command import begin, new_console, new_parser, status_of
from perf.report.stats import percentile
from perf.report.table import new_table
from perf.stack.stack import Stack, StackSpec, running

HEALTH_P99_MS = 100.0
PEAK_GROWTH_MIB = 768.0
"""Growth of resident memory that is allowed at its peak, in MiB: 256 for bodies, 64 for prompts,
those of one that is being decoded, and as much again."""

ATTACKS = attacks.ATTACKS | triton_attacks.ATTACKS


@dataclass(frozen=True, slots=True)
class AttackRow:
    """Outcome of one attack."""

    attack: str
    what: str
    seed: int
    tries: int
    outcomes: dict[str, int]
    faults: list[str]
    health_p99_ms: float
    """Latency on the port that is attacked; ``health_port_p99_ms`` is what is judged."""
    health_worst_ms: float
    health_port_p99_ms: float
    health_port_worst_ms: float
    peak_mib: float
    """Peak memory of the orchestrator."""
    rss_mib: dict[str, tuple[float, float]]
    fds: dict[str, tuple[int, int]]


def target_of(stack: Stack) -> Target:
    """Addresses, process ids and logs of a stack, for its attackers."""
    logs = state_dir() / "perf"
    return Target(
        HOST,
        stack.port,
        stack.triton.ports.http,
        stack.grpc_address,
        "demo",
        stack.pids(),
        (logs / "orchestrator.log", logs / "triton-0.log"),
        stack.health_port,
    )


async def attack(name: str, target: Target, seed: int, seconds: float) -> AttackRow:
    """Run one attack of ``seconds`` behind another that warms up what grows once."""
    one = ATTACKS[name]
    warm = Tally()
    await one(target, random.Random(seed + 1), warm, Budget(1e9, seconds / 2))
    await StateChecks(target).close(warm)
    checks, tally, probe = StateChecks(target), Tally(), HealthProbe(target)
    async with probe:
        await one(target, random.Random(seed), tally, Budget(1e9, seconds))
    after = await checks.close(tally)
    p99_ms = percentile(probe.port_latencies_ms, 99)
    if p99_ms > HEALTH_P99_MS:
        tally.fault(f"the health port took {p99_ms:.0f} ms at the 99th percentile")
    growth_mib = probe.peak_mib - checks.before["orchestrator"].rss_mib
    if growth_mib > PEAK_GROWTH_MIB:
        tally.fault(f"the orchestrator grew by {growth_mib:.0f} MiB")
    return AttackRow(
        attack=name,
        what=(one.__doc__ or "").strip(),
        seed=seed,
        tries=tally.tries,
        outcomes=dict(tally.outcomes.most_common()),
        faults=tally.faults,
        health_p99_ms=percentile(probe.latencies_ms, 99),
        health_worst_ms=max(probe.latencies_ms),
        health_port_p99_ms=p99_ms,
        health_port_worst_ms=max(probe.port_latencies_ms),
        peak_mib=probe.peak_mib,
        rss_mib={p: (one.rss_mib, after[p].rss_mib) for p, one in checks.before.items()},
        fds={p: (one.fds, after[p].fds) for p, one in checks.before.items()},
    )


def show(rows: list[AttackRow], console: Console) -> None:
    """Print tries and health checks as a table, outcomes and faults below it."""
    columns = ("tries", "health port p99", "main port p99", "orchestrator MiB", "faults")
    table = new_table("attack", *columns)
    for row in rows:
        before, after = row.rss_mib["orchestrator"]
        table.add_row(
            row.attack,
            str(row.tries),
            f"{row.health_port_p99_ms:.0f} ms",
            f"{row.health_p99_ms:.0f} ms",
            f"{before:.0f} → {row.peak_mib:.0f} → {after:.0f}",
            str(len(row.faults)),
        )
    console.print(table)
    for row in rows:
        outcomes = ", ".join(f"{what} {count}" for what, count in list(row.outcomes.items())[:8])
        console.print(f"{row.attack}: {outcomes}", markup=False)
    for row in rows:
        for fault in row.faults:
            console.print(f"{row.attack}: {fault}", markup=False, style="red")


async def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack")
    parser.add_argument("--only", nargs="*", choices=ATTACKS, help="these attacks")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    recording = begin(parser, args, "perf.attack", *sys.argv[1:])
    console, rows = new_console(140), []
    spec = StackSpec(lane_token=secrets.token_hex(16), with_health_port=True)
    async with running(spec) as stack:
        target = target_of(stack)
        for name in args.only or ATTACKS:
            console.print(f"{name} …", style="dim")
            rows.append(await attack(name, target, args.seed, args.seconds))
    show(rows, console)
    recording.save(recording.facts() | {"seconds": args.seconds, "rows": rows})
    return int(any(row.faults for row in rows))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
