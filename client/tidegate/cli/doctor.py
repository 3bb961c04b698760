"""``tidegate doctor``: this machine, and whether its service needs more instances by its own gauge
(PF-7). Alerts look at the last minutes, and are the better judge where Prometheus runs."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidegate.cli.arguments import PORT, Command, json_option, option
from tidegate.cli.runtime import importing
from tidegate.cli.terminal import console, print_json
from tidegate.cli.top import Samples

if TYPE_CHECKING:
    from pool.preflight.checkup import CheckupFinding

DESCRIPTION = """\
Look at this machine: what is missing, what makes it slow, and what to do about each.

  tidegate doctor
  tidegate doctor --device cuda       a GPU is a must
  tidegate doctor --json
"""

EPILOG = """\
exit status: 0 it can serve (warnings cost speed or features), 1 something keeps it from serving
"""

_TIMEOUT_S = 2.0
_NEEDED = "tidegate_instances_needed"
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command(cls=Command, help=DESCRIPTION, epilog=EPILOG, short_help="what this machine lacks")
@option("--device", type=click.Choice(["cuda", "cpu"]), help="what it is to run on (either)")
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
        from pool.preflight.checkup import CheckupVerdict, WantedService, examine

    def findings() -> "Iterator[CheckupFinding]":
        yield from examine(WantedService(state_dir(), device, triton, host, port))
        about_load = look(host, port) if port else None
        if about_load is not None:
            yield about_load

    found = []
    for finding in findings():
        found.append(finding)
        if not as_json:
            _print(finding)
    fails = sum(finding.verdict is CheckupVerdict.FAIL for finding in found)
    warns = sum(finding.verdict is CheckupVerdict.WARN for finding in found)
    if as_json:
        print_json({"can_serve": not fails, "findings": [asdict(finding) for finding in found]})
    elif fails:
        console().print(f"\n{fails} to mend before it can serve.", style="bold red")
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


def look(host: str, port: int) -> "CheckupFinding | None":
    """Judge the service that listens there; None if there is none, or not ours."""
    import urllib.request

    from pool.preflight.checkup import CheckupFinding, CheckupVerdict
    from pool.process.ports import host_port

    try:
        with urllib.request.urlopen(
            f"http://{host_port(host, port)}/metrics", timeout=_TIMEOUT_S
        ) as answer:
            samples = Samples.parse(answer.read().decode(), at=0.0)
    except (OSError, ValueError):  # urllib's own errors are OSErrors
        return None
    if _NEEDED not in samples.values:
        return None
    instances = len(samples.by("tidegate_instance_slots", "instance"))
    # Each of several processes at one port reports all instances.
    most: dict[str, float] = {}
    for labels, value in samples.values[_NEEDED]:
        most[labels["model"]] = max(value, most.get(labels["model"], 0.0))
    needed = sum(max(1, round(value)) for value in most.values())
    found = f"the present load needs {needed} of {instances}"
    if needed > instances:
        return CheckupFinding("instances", CheckupVerdict.WARN, found, f"add {needed - instances}")
    return CheckupFinding("instances", CheckupVerdict.OK, found)
