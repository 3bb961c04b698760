"""``make record``: records every bundle of the documents and of the table in perf/README.md again,
from one clean commit.

    python -m perf.record [--only NAME …] [--dry-run] [--traces FOLDER]

Each entry of ``TABLE`` is a command of ``perf``. The commands run one after the other, each in its
own process. A bundle is moved to ``perf/results`` if all of its parts were measured and nothing
failed. Otherwise the old bundle stays, the reason is printed, and the run continues. The output is
in ``build/record/NAME``. The exit status is 1 if a bundle was not recorded. Run ``make figures``
afterwards to update the documents.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from perf.report.command import new_console, new_parser
from perf.report.recording import RESULTS, ROOT, Checkout, DirtyTree


@dataclass(frozen=True, slots=True)
class Recordable:
    """One bundle: ``python -m command --json …``.

    In the command, ``{traces}`` is the folder of Azure's traces, and ``{folder}`` the entry's own.
    ``on`` is a requirement of the machine (``has``); other machines skip the entry unless it is
    named. ``picture`` is written to ``{folder}``.
    """

    name: str
    command: str
    on: str = ""
    picture: str = ""

    @property
    def folder(self) -> Path:
        return ROOT / "build" / "record" / self.name

    @property
    def files(self) -> list[Path]:
        """Output files of the entry, the bundle first."""
        names = [f"{self.name}.json", *([self.picture] if self.picture else [])]
        return [self.folder / name for name in names]

    def words(self, traces: Path) -> list[str]:
        return [w.format(traces=traces, folder=self.folder) for w in self.command.split()]


_CONVERSATION: Final = "{traces}/azure-llm-2023-conversation.csv"
_CODE: Final = "{traces}/azure-llm-2023-code.csv"
_ON_GPU: Final = (
    "--arrivals trace --loads 2 --turns 4 --policies ours no-prediction fifo-hang-up --model 8b"
)
TABLE: Final = (
    Recordable("quick", "perf.service --quick"),
    Recordable(
        "full-cpu",
        "perf.service --only deadline ttft relay relay-single paced cancel admission",
    ),
    Recordable("starts", "perf.service --only starts"),
    Recordable("agents", "perf.service --only agents"),
    Recordable("choices", "perf.engine.choices"),
    Recordable("peers-avx512", "perf.peers --rates 6 12 20 32 --seconds 10", on="avx512"),
    Recordable("peers-real", "perf.peers --model smollm2 --loads 0.7 1 2 3"),
    Recordable("peers-real-alone", "perf.peers --model smollm2 --alone"),
    Recordable("peers-real-busy", "perf.peers --model smollm2 --alone --busy 2"),
    Recordable("picker", "perf.peers.picker"),
    Recordable("picker-vllm", "perf.peers.picker --pods vllm --rates 12 16"),
    Recordable("fleet", "perf.peers.fleet"),
    Recordable(
        "goodput-real",
        f"perf.goodput --trace {_CONVERSATION} --trace {_CODE} --loads 2 --seconds 10",
    ),
    Recordable(
        "sim-traces",
        f"perf.sim --trace {_CONVERSATION} {_CODE} --arrivals trace --deadlines proportional parts"
        " --loads 1 2 3 --seeds 3 --rows --plot {folder}/goodput-traces",
        picture="goodput-traces.png",
    ),
    Recordable(
        "sim-h100",
        f"perf.sim --trace {_CODE} --engines h100-29 h100-16 h100-12 --arrivals trace"
        " --deadlines constant --loads 2 --minutes 0.2 --rows",
    ),
    Recordable("sim-cells", "perf.sim --cells --rows 16 --seeds 2"),
    Recordable("sim-quotes", "perf.sim quotes"),
    Recordable("sim-crowds", "perf.sim crowds --seeds 1"),
    Recordable("sim-reported", "perf.sim reported"),
    Recordable("sim-chains", "perf.sim runs --loads 1.2"),
    Recordable(
        "chaos-kills", "perf.chaos --kills 100 --stops 50 --engine synthetic-paced --clients 2"
    ),
    Recordable("polled-starts", "perf.chaos --starts 50 --kills 20 --engine synthetic-paced"),
    Recordable("fleet-kills", "perf.chaos.fleet --orchestrators 2 --kills 100 --stops 50"),
    Recordable("batch-kills", "perf.chaos.batches"),
    # Less than an hour cannot show growth: caches and allocators fill for ten minutes.
    Recordable("soak", "perf.chaos --soak 3600", on="an hour"),
    Recordable("slot-soak", "perf.clips --soak 600"),
    Recordable("gpu-h100", "perf.engine.gpu", on="gpu"),
    Recordable(
        "goodput-h100-code", f"perf.goodput {_ON_GPU} --answers 28 --trace {_CODE}", on="gpu"
    ),
    Recordable(
        "goodput-h100-conversation",
        f"perf.goodput {_ON_GPU} --answers 211 --trace {_CONVERSATION}",
        on="gpu",
    ),
)
"""Entries in the order of execution."""


def has(what: str) -> bool:
    """Whether this machine has a ``gpu``, or a CPU with ``avx512`` but without AMX, which has its
    own kernels. No machine has ``an hour``: such long entries are recorded only when they are
    named."""
    if what == "gpu":
        return shutil.which("nvidia-smi") is not None
    flags = Path("/proc/cpuinfo").read_text()
    return what == "avx512" and "avx512f" in flags and "amx_tile" not in flags


def why_not_whole(facts: dict[str, Any], commit: str) -> str:
    """Reason not to record a bundle; empty if it is good."""
    if facts["commit"] != commit or facts["dirty"]:
        return f"it is of commit {facts['commit'][:12]}{' with changes' * facts['dirty']}"
    parts = [part for part in facts.get("results", ()) if part["failed"] or part["skipped"]]
    return "; ".join(f"{part['name']}: {part['failed'] or part['skipped']}" for part in parts)


def record(entry: Recordable, commit: str, traces: Path) -> str:
    """Run an entry and move its output into ``RESULTS``. Returns an empty string, or why it was not
    recorded."""
    shutil.rmtree(entry.folder, ignore_errors=True)
    entry.folder.mkdir(parents=True)
    log = entry.folder / "log.txt"
    command = [sys.executable, "-m", *entry.words(traces), "--json", str(entry.files[0])]
    with log.open("wb") as output:
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output).returncode
    if status:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2] or "not a word"
        return f"exit status {status}: {last}"
    if why := why_not_whole(msgspec.json.decode(entry.files[0].read_bytes()), commit):
        return why
    for path in entry.files:
        shutil.copyfile(path, ROOT / RESULTS / path.name)
    return ""


def record_all(entries: Sequence[Recordable], commit: str, traces: Path, console: Console) -> int:
    """Record all entries; return the exit status, 1 if one of them was not recorded."""
    lost = 0
    for entry in entries:
        at = time.monotonic()
        why = record(entry, commit, traces)
        lost += bool(why)
        told = f"not recorded: {why} ({entry.folder.relative_to(ROOT)}/log.txt)" if why else "done"
        console.print(f"{entry.name}: {time.monotonic() - at:.0f} s, {told}", markup=False)
    console.print(f"{len(entries) - lost} of {len(entries)} recorded at {commit[:12]}")
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
        help="with Azure's traces of 2023; by default shared/traces next to the checkout",
    )
    return parser


def main() -> int:
    parser = new_arguments()
    args = parser.parse_args()
    console = new_console(150)
    entries = [entry for entry in TABLE if entry.name in args.only]
    for entry in entries:
        console.print(f"{entry.name}: python -m {entry.command}", markup=False, soft_wrap=True)
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
    return record_all(entries, checkout.commit, traces, console)


if __name__ == "__main__":
    sys.exit(main())
