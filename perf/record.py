"""``make record``: every bundle that a document shows, recorded anew from one clean commit.

    python -m perf.record [--only NAME …] [--dry-run] [--traces FOLDER]

Says first what it will run and for how long. Each entry of ``TABLE`` is a command of ``perf``, in a
process of its own. What measures time runs alone; what is judged by counts, or runs on virtual
time, comes last, two at once. A bundle gets into ``perf/results`` when all of its parts were
measured and nothing failed; else the old one stays, the reason is said, and the others go on. What
they print is in ``build/record/NAME``. The exit status is 1 when one of them was not recorded.

Afterwards ``make figures`` writes the documents.
"""

import argparse
import asyncio
import heapq
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from perf.report.command import new_console, new_parser, status_of
from perf.report.recording import RESULTS, ROOT, Checkout, DirtyTree
from perf.stack.proxies import KINDS

AT_ONCE: Final = 2
"""Number of entries run at once, of those that may run beside others."""
_PATIENCE: Final = 3
_SLACK_S: Final = 600
"""Seconds that an entry may take beyond ``_PATIENCE`` times what it should, for what is installed
or compiled the first time; after that it hangs."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One bundle: ``python -m module arguments --json …``, about ``seconds`` on two cores.

    In an argument ``{traces}`` is the folder of Azure's traces, ``{folder}`` the entry's own.
    ``beside``: others may run at the same time. ``on``: what the machine must have (``has``); the
    entry is left out elsewhere unless it is named. ``engine`` is provided first, by ``tidegate
    engines ensure``. ``picture`` is drawn into ``{folder}``.
    """

    name: str
    module: str
    arguments: str
    seconds: int
    beside: bool = False
    on: str = ""
    engine: str = ""
    picture: str = ""

    @property
    def folder(self) -> Path:
        return ROOT / "build" / "record" / self.name

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def files(self) -> list[Path]:
        """Files that the entry leaves, the bundle first."""
        names = [f"{self.name}.json", *([self.picture] if self.picture else [])]
        return [self.folder / name for name in names]

    def words(self, traces: Path) -> list[str]:
        return [w.format(traces=traces, folder=self.folder) for w in self.arguments.split()]

    def commands(self, traces: Path) -> list[list[str]]:
        """Commands to run one after the other, in ``ROOT``."""
        python = [sys.executable, "-m"]
        run = [*python, self.module, *self.words(traces), "--json", str(self.files[0])]
        ensure = [*python, "tidegate", "engines", "ensure", self.engine]
        return [ensure, run] if self.engine else [run]


_CONVERSATION: Final = "{traces}/azure-llm-2023-conversation.csv"
_CODE: Final = "{traces}/azure-llm-2023-code.csv"
_SERVICE: Final = (
    "deadline placement parsing ttft relay relay-single paced step-triton cancel kinds burst queued"
    " admission journal"
)
_CPU_FLAGS: Final = ("avx2", "avx512f", "amx_tile")
_ENGINE: Final = "decode prefill mixed prefix resume"
CPUS: Final = ("avx2", "avx512", "amx")
"""Kinds of CPUs whose engine figures are kept apart: each has kernels of its own."""
TABLE: Final = (
    Entry("quick", "perf.service", "--quick", 100),
    Entry("swap-cpu", "perf.swap", "", 65),
    Entry("full-cpu", "perf.service", f"--only {_SERVICE}", 440),
    Entry("shared-state", "perf.service", "--only state", 150),
    Entry("processes", "perf.service", "--only processes", 150),
    Entry("finish", "perf.service", "--only finish", 200),
    Entry("quotes", "perf.service", "--only quotes", 290),
    Entry("starts", "perf.service", "--only starts", 60),
    Entry("front", "perf.service", "--only front", 60, on="a proxy"),
    *(Entry(f"engine-{cpu}", "perf.engine", f"--only {_ENGINE}", 900, on=cpu) for cpu in CPUS),
    Entry("slot", "perf.slot", "", 165),
    *(
        Entry(
            f"peers-{cpu}",
            "perf.peers",
            "--only goodput speed relay --rates 6 12 20 32 --seconds 10",
            750,
            on=cpu,
        )
        for cpu in CPUS
    ),
    Entry("conformance", "perf.peers", "--only conformance", 420, engine="llamacpp"),
    Entry(
        "goodput-real",
        "perf.goodput",
        f"--trace {_CONVERSATION} --trace {_CODE} --loads 2 --seconds 10",
        190,
    ),
    Entry(
        "goodput-rows",
        "perf.goodput.rows",
        "--cells twice flood batch --seeds 3 --seconds 8",
        700,
    ),
    Entry("rollout", "perf.rollout", "", 90),
    Entry("batch-kills", "perf.chaos.batches", "", 1500, beside=True),
    Entry(
        "goodput-timed",
        "perf.goodput.rows",
        "--timed --cells capacity twice tight flood batch long-prompts --seeds 3 --seconds 5",
        1650,
    ),
    # Less than an hour says nothing of growth: caches and allocators fill for ten minutes.
    Entry("soak", "perf.chaos", "--soak 3600", 3660, beside=True, on="an hour"),
    Entry("slot-soak", "perf.slot", "--soak 600", 640, beside=True),
    Entry(
        "sim-traces",
        "perf.sim",
        f"--trace {_CONVERSATION} {_CODE} --arrivals trace --deadlines proportional parts --loads 1"
        " 2 3 --seeds 3 --rows --processes 1 --plot {folder}/goodput-traces",
        350,
        beside=True,
        picture="goodput-traces.png",
    ),
    Entry("sim-cells", "perf.sim", "--cells --rows 16 --seeds 2 --processes 1", 320, beside=True),
    Entry(
        "sim-quotes",
        "perf.sim.quotes",
        "--seconds 60 --plot {folder}/quotes",
        500,
        beside=True,
        picture="quotes.png",
    ),
    Entry(
        "chaos-kills",
        "perf.chaos",
        "--kills 100 --engine synthetic-paced --clients 2",
        320,
        beside=True,
    ),
    Entry("fleet-kills", "perf.chaos.fleet", "--kills 100", 1150, beside=True),
    Entry("chaos", "perf.chaos", "--engine synthetic-paced --clients 2", 200, beside=True),
    Entry(
        "chaos-torch", "perf.chaos", "--engine torch --clients 2 --seconds 120", 140, beside=True
    ),
    Entry("sim-fleet", "perf.sim.fleet", f"--trace {_CONVERSATION}", 660, beside=True),
    Entry("sim-reported", "perf.sim.reported", "", 300, beside=True),
    Entry(
        "sim-chains",
        "perf.sim.chains",
        "--loads 1.2 --manners nothing split learnt calls fifo jitserve jitserve-stages",
        600,
        beside=True,
    ),
    Entry(
        "sim-slow-tools",
        "perf.sim.slow_tools",
        "--loads 0.9 --slow 0.1 --seconds 60 --manners wait quarter",
        110,
        beside=True,
    ),
    Entry("gpu-kernels", "perf.engine.occupancy", "", 25, beside=True),
    # As long as all of its sections may take; a lease of half an hour has room for that.
    Entry("gpu-h100", "perf.engine.gpu", "--budget-s 1700", 1500, on="gpu"),
    Entry(
        "gpu-h100-more",
        "perf.engine.gpu",
        "--budget-s 130 --only copies swap tokens engine lost",
        130,
        on="gpu",
    ),
    Entry(
        "goodput-h100-code",
        "perf.goodput",
        f"--model 8b --answers 28 --trace {_CODE} --arrivals trace --loads 2 --turns 4 --policies"
        " ours no-prediction fifo-hang-up",
        400,
        on="gpu",
    ),
    Entry(
        "goodput-h100-conversation",
        "perf.goodput",
        f"--model 8b --answers 211 --trace {_CONVERSATION} --arrivals trace --loads 2 --turns 4"
        " --policies ours no-prediction fifo-hang-up",
        900,
        on="gpu",
    ),
)
"""Entries in the order in which they run."""


def has(what: str) -> bool:
    """Whether this machine has a ``gpu``, ``a proxy``, or a CPU of the kind in ``CPUS``. No
    machine has ``an hour``: what takes so long is recorded when it is named."""
    if what == "gpu":
        return shutil.which("nvidia-smi") is not None
    if what == "a proxy":
        return any(kind.is_here for kind in KINDS)
    flags = Path("/proc/cpuinfo").read_text()
    kinds = [kind for kind, flag in zip(CPUS, _CPU_FLAGS, strict=True) if flag in flags]
    return kinds[-1:] == [what]


def seconds_of(entries: Sequence[Entry]) -> int:
    """Seconds that all entries take together, about."""
    ends = [0] * AT_ONCE
    for entry in entries:
        if entry.beside:
            heapq.heapreplace(ends, ends[0] + entry.seconds)
    return sum(entry.seconds for entry in entries if not entry.beside) + max(ends)


def show_plan(entries: Sequence[Entry], console: Console) -> None:
    """Print what will run, and for how long."""
    for entry in entries:
        beside = f", {AT_ONCE} at once" if entry.beside else ""
        said = f"{entry.name}, about {entry.seconds} s{beside}: python -m {entry.module}"
        console.print(f"{said} {entry.arguments}".rstrip(), markup=False, soft_wrap=True)
    console.print(
        f"{len(entries)} bundles, about {seconds_of(entries) / 60:.0f} minutes on two cores; what"
        " they are compared with (vLLM, vllm-router, llama.cpp, LiteLLM) is installed first where"
        " it is not"
    )


def why_not_whole(facts: dict[str, Any], commit: str) -> str:
    """Reason why a bundle is not to be recorded; empty where it is."""
    if facts["commit"] != commit or facts["dirty"]:
        return f"it is of commit {facts['commit'][:12]}{' with changes' * facts['dirty']}"
    parts = [part for part in facts.get("results", ()) if part["failed"] or part["skipped"]]
    return "; ".join(f"{part['name']}: {part['failed'] or part['skipped']}" for part in parts)


async def record(entry: Entry, commit: str, traces: Path) -> str:
    """Run an entry and move what it leaves into ``RESULTS``; returns why not, in words, or
    nothing."""
    shutil.rmtree(entry.folder, ignore_errors=True)
    entry.folder.mkdir(parents=True)
    for command in entry.commands(traces):
        status = await _run(command, entry.log, _PATIENCE * entry.seconds + _SLACK_S)
        if status != 0:
            said = entry.log.read_text(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(said) if line.strip()), "not a word")
            return f"{'not done in time' if status is None else f'exit status {status}'}: {last}"
    if why := why_not_whole(msgspec.json.decode(entry.files[0].read_bytes()), commit):
        return why
    for path in entry.files:
        shutil.copyfile(path, ROOT / RESULTS / path.name)
    return ""


async def _run(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Exit status of ``command``; None when it was ended for taking longer than ``limit_s``."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        async with asyncio.timeout(limit_s):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.terminate()  # it ends what it has started
            await process.wait()


async def record_all(entries: Sequence[Entry], commit: str, traces: Path, console: Console) -> int:
    """Record all entries; returns the exit status, 1 when one of them was not recorded."""
    begun, lost = time.monotonic(), list[str]()
    free = asyncio.Semaphore(AT_ONCE)

    async def one(entry: Entry) -> None:
        async with free:
            console.print(f"{entry.name}: about {entry.seconds} s …", style="dim")
            at = time.monotonic()
            why = await record(entry, commit, traces)
            took = f"{entry.name}: {time.monotonic() - at:.0f} s"
            if why:
                lost.append(entry.name)
                shown = entry.log.relative_to(ROOT)
                console.print(f"{took}, not recorded: {why} ({shown})", markup=False, style="red")
            else:
                console.print(f"{took}, recorded")

    for entry in entries:
        if not entry.beside:
            await one(entry)
    async with asyncio.TaskGroup() as group:
        for entry in entries:
            if entry.beside:
                group.create_task(one(entry))
    minutes = (time.monotonic() - begun) / 60
    console.print(
        f"{len(entries) - len(lost)} of {len(entries)} recorded at {commit[:12]} in {minutes:.0f}"
        f" minutes{''.join(f', not {name}' for name in lost)}; next: make figures"
    )
    return int(bool(lost))


def new_arguments() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, saves=False)
    names = [entry.name for entry in TABLE]
    usual = [entry.name for entry in TABLE if not entry.on or has(entry.on)]
    parser.add_argument("--only", nargs="+", choices=names, default=usual, metavar="NAME")
    parser.add_argument("--dry-run", action="store_true", help="only say what would run")
    parser.add_argument(
        "--traces",
        type=Path,
        default=ROOT.parent / "shared" / "traces",
        metavar="FOLDER",
        help="with Azure's traces of 2023; by default shared/traces beside the checkout",
    )
    return parser


def main() -> int:
    parser = new_arguments()
    args = parser.parse_args()
    console = new_console(150)
    entries = [entry for entry in TABLE if entry.name in args.only]
    show_plan(entries, console)
    if args.dry_run:
        return 0
    checkout, traces = Checkout.of(), args.traces.resolve()
    try:
        checkout.check(ROOT / RESULTS, allow_dirty=False)
    except DirtyTree as error:
        parser.error(str(error))
    for entry in entries:
        for word in entry.words(traces):
            if Path(word).parent == traces and not Path(word).is_file():
                parser.error(f"{entry.name}: there is no {word}; --traces says where it is")
    return status_of(record_all(entries, checkout.commit, traces, console))


if __name__ == "__main__":
    sys.exit(main())
