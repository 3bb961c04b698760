"""Every check and measurement of the worker's engine, in one go (``make bench-engine``).

    python -m perf.engine.gpu [--json PATH] [--device cuda|cpu] [--shape NAME]

Needs torch (2.11 or later), numpy, safetensors and msgspec; no Triton server, no settings, no
network. Each section runs in a process of its own with a time limit: one that crashes the device
or hangs costs its own rows only. Ends with a table; ``--json`` also writes a bundle (PF-6).

``--device cpu --shape 0.5b`` measures a CPU; with ``--shape tiny`` its logic runs anywhere.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import torch

from perf.engine import gpu_parts
from perf.engine.checkpoints import SHAPES, roomy_folder
from perf.report.machine import versions
from perf.report.recording import DirtyTree, Recording
from perf.report.rows import Report, Row, line, read_rows

SECTIONS: Final = {
    "engine": 200.0,
    "loader": 130.0,
    "resume": 60.0,
}
"""Sections with the most seconds that each may take, when all of the budget is left."""
BUDGET_S: Final = 390.0
_GRACE_S: Final = 5.0
_ROOT: Final = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run the sections; returns 0 when each ran to its end, whatever it found, else 1."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options = parser.parse_args(given)
    if options.section:
        _run_section(options)
        return 0
    try:
        recording = Recording.begin(
            ["perf.engine.gpu", *given], options.json, allow_dirty=options.allow_dirty
        )
    except DirtyTree as error:
        parser.error(str(error))
    started = time.monotonic()
    scratch = Path(options.scratch or tempfile.mkdtemp(prefix="tidegate-gpu-", dir=roomy_folder()))
    scratch.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    complete = True
    try:
        chosen = options.only or list(SECTIONS)
        for name in chosen:
            left_s = started + options.budget_s - time.monotonic()
            found, whole = _section_in_child(name, options, scratch, left_s)
            rows += found
            complete = complete and whole
    finally:
        if not options.scratch:
            shutil.rmtree(scratch, ignore_errors=True)
    facts = recording.facts() | {
        "versions": versions("triton", "safetensors"),
        "seconds": round(time.monotonic() - started, 1),
    }
    print("\n" + "\n".join(f"{name}: {value}" for name, value in facts.items()))
    print("\n".join(map(line, rows)))
    recording.save(facts | {"complete": complete, "rows": rows})
    return 0 if complete else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="perf.engine.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), default="8b", help="of the model; tiny: tries"
    )
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), help="these sections")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all of it")
    parser.add_argument("--json", type=Path, help="save a bundle there")
    parser.add_argument(
        "--allow-dirty", action="store_true", help="though the checkout has changes"
    )
    parser.add_argument(
        "--scratch", help="directory for checkpoints, kept; 17 GB (else in /dev/shm if they fit)"
    )
    parser.add_argument("--section", choices=tuple(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, help=argparse.SUPPRESS)
    return parser


def _section_in_child(
    name: str, options: argparse.Namespace, scratch: Path, left_s: float
) -> tuple[list[Row], bool]:
    """Rows of a section run in a child process, and whether it ran to its end."""
    limit_s = min(SECTIONS[name], left_s - _GRACE_S)
    if limit_s < 5:
        row = Row(name, "section", "left out", "", "no time left")
        print(line(row), flush=True)
        return [row], False
    file = scratch / f"{name}.jsonl"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "perf.engine.gpu", "--section", name]
    command += ["--device", options.device]
    command += ["--rows", str(file), "--scratch", str(scratch), "--limit-s", str(limit_s)]
    command += ["--shape", options.shape]
    started = time.monotonic()
    problem = ""
    try:
        code = subprocess.run(command, cwd=_ROOT, timeout=limit_s + _GRACE_S).returncode
        if code:
            problem = f"its process ended with {code}; what it said is above"
    except subprocess.TimeoutExpired:
        problem = f"stopped after {limit_s + _GRACE_S:.0f} s"
    rows = read_rows(file)
    seconds = time.monotonic() - started
    ending = Row(name, "section", "FAILED" if problem else f"{seconds:.0f}", "s", problem)
    print(line(ending), flush=True)
    return [*rows, ending], not problem


def _run_section(options: argparse.Namespace) -> None:
    """Run one section, within the child process."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no usable GPU; --device cpu --shape 0.5b")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    report = Report(options.section, options.rows, ends_at=time.monotonic() + options.limit_s)
    scratch = Path(options.scratch)
    run = {
        "loader": gpu_parts.loader,
        "engine": gpu_parts.engine,
        "resume": gpu_parts.resume,
    }[options.section]
    run(report, device, scratch, options.shape)


if __name__ == "__main__":
    sys.exit(main())
