"""``tidegate doctor``: what it prints.

Imported after ``runtime.add_to_path``, which finds ``orchestrator``.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from catalog.paths import state_dir
from pool.preflight.checkup import Finding, Verdict, WantedService, examine
from tidegate.cli import scaling
from tidegate.cli.terminal import console, print_json

_MARKS = {
    Verdict.OK: ("ok  ", "green"),
    Verdict.WARN: ("warn", "yellow"),
    Verdict.FAIL: ("FAIL", "bold red"),
}


def run(device: str | None, triton: Path | None, host: str, port: int, *, as_json: bool) -> int:
    """Print what is found of this machine; returns 1 when something keeps it from serving."""
    wanted = WantedService(state_dir(), device, triton, host, port)
    found: list[Finding] = []
    out = console()
    for finding in _all_of(wanted):
        found.append(finding)
        if not as_json:
            out.print(_line(finding), soft_wrap=True)
    fails = sum(finding.verdict is Verdict.FAIL for finding in found)
    warns = sum(finding.verdict is Verdict.WARN for finding in found)
    if as_json:
        print_json({"can_serve": not fails, "findings": [asdict(finding) for finding in found]})
    elif fails:
        out.print(f"\n{fails} to mend before it can serve.", style="bold red")
    else:
        out.print("\nIt can serve" + (f"; {warns} could be better." if warns else "."))
    return 1 if fails else 0


def _all_of(wanted: WantedService) -> Iterator[Finding]:
    """What there is to say of the machine, and of the service that already runs at that port."""
    yield from examine(wanted)
    about_load = scaling.look(wanted.host, wanted.port) if wanted.port else None
    if about_load is not None:
        yield about_load


def _line(finding: Finding) -> Text:
    mark, style = _MARKS[finding.verdict]
    text = Text.assemble((mark, style), f"  {finding.check:<11} {finding.found}")
    if finding.advice:
        text.append(f"\n      {'':<11} → {finding.advice}")
    return text
