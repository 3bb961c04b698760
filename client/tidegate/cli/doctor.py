"""``tidegate doctor``: reports what this machine lacks, and how to fix it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidegate.cli.arguments import PORT, Command, json_option, option
from tidegate.cli.runtime import importing
from tidegate.cli.terminal import console, print_json

if TYPE_CHECKING:
    from pool.preflight.checkup import CheckupFinding

DESCRIPTION = """\
Check this machine: what is missing, what makes it slow, and how to fix each problem.

  tidegate doctor
  tidegate doctor --device cuda       a GPU is a must
  tidegate doctor --json
"""

EPILOG = """\
exit status: 0 it can serve (a warning costs speed or a feature), 1 it cannot serve
"""

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command(cls=Command, help=DESCRIPTION, epilog=EPILOG, short_help="what this machine lacks")
@option("--device", type=click.Choice(["cuda", "cpu"]), help="device to serve on (either)")
@option(
    "--triton",
    type=Path,
    metavar="PATH",
    envvar="TIDEGATE_TRITON",
    help="the server that would be used",
)
@option("--host", default="127.0.0.1", envvar="TIDEGATE_HOST", help="to listen on")
@option("--port", type=PORT, default=8080, envvar="TIDEGATE_PORT", help="to take")
@json_option
def doctor(device: str | None, triton: Path | None, host: str, port: int, as_json: bool) -> int:
    with importing(serving=True):
        from catalog.paths import state_dir
        from pool.preflight.checkup import CheckupVerdict, examine

    found = []
    for finding in examine(state_dir(), device, triton, host, port):
        found.append(finding)
        if not as_json:
            _print(finding)
    fails = sum(finding.verdict is CheckupVerdict.FAIL for finding in found)
    warns = sum(finding.verdict is CheckupVerdict.WARN for finding in found)
    if as_json:
        print_json({"can_serve": not fails, "findings": [asdict(finding) for finding in found]})
    elif fails:
        console().print(f"\n{fails} to fix before it can serve.", style="bold red")
    else:
        console().print("\nIt can serve" + (f"; {warns} could be better." if warns else "."))
    return 1 if fails else 0


def _print(finding: "CheckupFinding") -> None:
    from rich.text import Text

    mark = f"{finding.verdict:<4}" if finding.verdict != "fail" else "FAIL"
    text = Text.assemble((mark, _STYLES[finding.verdict]), f"  {finding.check:<11} {finding.found}")
    if finding.advice:
        text.append(f"\n      {'':<11} → {finding.advice}")
    console().print(text, soft_wrap=True)
