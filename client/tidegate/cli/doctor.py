"""``tidegate doctor``: this machine, and whether its service needs more or fewer instances.

The rules for that are those of the alerts (docker/observability/alerts.yaml, group
``tidegate-advice`` and PF-4's warnings), over all that the service counted since it started: alerts
look at the last minutes, and are the better judge where Prometheus runs.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidegate.cli.arguments import PORT, Choice, Command, json_option, option
from tidegate.cli.runtime import importing
from tidegate.cli.terminal import console, duration, print_json, share
from tidegate.cli.top import Samples

if TYPE_CHECKING:
    from pool.preflight.checkup import Finding

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
_UNAVAILABLE, _MISSED_BY_QUEUE = 0.05, 0.005
_SLOW_MS = 3000.0
_WAIT_SHARE = 0.25
"""Share of an answer's time that waiting may take."""
_ENOUGH = 100
"""Least number of answers that say something."""
_NEEDED = "tidegate_instances_needed"

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command(cls=Command, help=DESCRIPTION, epilog=EPILOG, short_help="what this machine lacks")
@option("--device", type=Choice(["cuda", "cpu"]), help="what it is to run on (either)")
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
        from pool.preflight.checkup import Verdict, WantedService, examine

    def findings() -> "Iterator[Finding]":
        yield from examine(WantedService(state_dir(), device, triton, host, port))
        about_load = look(host, port) if port else None
        if about_load is not None:
            yield about_load

    found = []
    for finding in findings():
        found.append(finding)
        if not as_json:
            _print(finding)
    fails = sum(finding.verdict is Verdict.FAIL for finding in found)
    warns = sum(finding.verdict is Verdict.WARN for finding in found)
    if as_json:
        print_json({"can_serve": not fails, "findings": [asdict(finding) for finding in found]})
    elif fails:
        console().print(f"\n{fails} to mend before it can serve.", style="bold red")
    else:
        console().print("\nIt can serve" + (f"; {warns} could be better." if warns else "."))
    return 1 if fails else 0


def _print(finding: "Finding") -> None:
    from rich.text import Text

    mark = f"{finding.verdict:<4}" if finding.verdict != "fail" else "FAIL"
    text = Text.assemble((mark, _STYLES[finding.verdict]), f"  {finding.check:<11} {finding.found}")
    if finding.advice:
        text.append(f"\n      {'':<11} → {finding.advice}")
    console().print(text, soft_wrap=True)


def look(host: str, port: int) -> "Finding | None":
    """Judge the service that listens there; None if there is none, or not ours."""
    import urllib.request

    from pool.process.ports import host_port

    try:
        with urllib.request.urlopen(
            f"http://{host_port(host, port)}/metrics", timeout=_TIMEOUT_S
        ) as answer:
            text = answer.read().decode()
    except (OSError, ValueError):  # urllib's own errors are OSErrors
        return None
    samples = Samples.parse(text, at=0.0)
    return judge(samples) if _NEEDED in samples.values else None


def judge(samples: Samples) -> "Finding":
    """Advice from one scrape."""
    from pool.preflight.checkup import Finding, Verdict

    answers = samples.total("tidegate_http_responses_total") or 0.0
    instances = len(samples.by("tidegate_instance_slots", "instance"))
    # Each of several processes at one port reports all instances.
    needed = sum(max(1, round(most)) for most in samples.most(_NEEDED, "model").values())
    found = f"the present load needs {needed} of {instances}"
    reasons = _reasons_to_add(samples, answers)
    if needed > instances:
        reasons.insert(0, f"the present load needs {needed}, and there are {instances}")
    if reasons:
        advice = f"add {max(1, needed - instances)}"
        return Finding("instances", Verdict.WARN, "; ".join(reasons), advice)
    if needed < instances and answers >= _ENOUGH:
        advice = f"{needed} would do, if it has not been busier than now"
        return Finding("instances", Verdict.OK, found, advice)
    return Finding("instances", Verdict.OK, found)


def _reasons_to_add(samples: Samples, answers: float) -> list[str]:
    reasons: list[str] = []
    if answers < _ENOUGH:
        return reasons
    unavailable = sum(
        samples.total("tidegate_http_responses_total", status=status) or 0.0
        for status in ("503", "529")
    )
    if unavailable > _UNAVAILABLE * answers:
        reasons.append(f"{share(unavailable / answers)} of answers were 503")
    total_ms = samples.quantile("tidegate_total_ms", 0.95) or 0.0
    if total_ms > _SLOW_MS:
        reasons.append(f"one request in twenty took more than {duration(_SLOW_MS)}")
    wait_ms = samples.quantile("tidegate_queue_ms", 0.95) or 0.0
    missed = samples.total("tidegate_misses_total", stage="queue") or 0.0
    if wait_ms > _WAIT_SHARE * total_ms and missed > _MISSED_BY_QUEUE * answers:
        reasons.append(f"{missed:.0f} requests missed their deadline because they waited")
    return reasons
