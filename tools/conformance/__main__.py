"""Test what a deadline means at a server with OpenAI's chats or completions.

Only HTTP is spoken; times adapt to the server's pace, and the run's time is bounded. The exit
status is 0 when every rule that applies was kept, 1 when one was broken, 2 when the server or the
arguments cannot be used, 3 when something could not be measured. Load is part of it: never point
it at a server that others need now.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from . import VERSION
from .rules import chosen, table
from .run import NO_TEST, examine
from .server import Effort, Unusable
from .target import HANG_UP, BadTarget, Target, read_field, read_saying

KEY: Final = "DEADLINE_CONFORMANCE_KEY"
"""Environment variable with the API key: a command line can be read by others."""
_SAID: Final = "how a deadline is said: 'X-Timeout-Ms: {ms}', 'deadline_ms={ms}', or hang-up where"
_ONLY: Final = "a rule or a group of them; may be given several times"
_BOUNDS: Final = ("patience", "streams", "seconds")
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "url": {"help": "base URL of the API, for instance http://127.0.0.1:8000/v1"},
    "model": {"help": "a model that it serves"},
    "deadline": {"default": HANG_UP, "help": f"{_SAID} the server knows none (the default)"},
    "partial": {"help": "field that asks for a partial answer, for instance on_deadline=partial"},
    "completions": {"action": "store_true", "help": "ask for completions: it has no chats"},
    "only": {"action": "append", "default": [], "metavar": "RULE", "help": _ONLY},
    "patience": {"type": float, "help": "seconds after which a silent server hangs (30)"},
    "streams": {"type": int, "help": "most streams at once (64)"},
    "seconds": {"type": float, "help": "longest time of a run (600)"},
}
"""Options of the command, without their dashes."""


def target_of(given: Mapping[str, Any]) -> Target:
    """Target by the values of ``OPTIONS``. Raises ``BadTarget``."""
    partial = given.get("partial")
    return Target(
        given.get("url") or "",
        given.get("model") or "",
        read_saying(given.get("deadline") or HANG_UP),
        os.environ.get(KEY, ""),
        read_field(partial) if partial else {},
        not given.get("completions"),
    )


def effort_of(given: Mapping[str, Any]) -> Effort:
    """Bounds by the values of ``OPTIONS``. Raises ``BadTarget``."""
    bounds = {name: given[name] for name in _BOUNDS if given.get(name) is not None}
    for name, value in bounds.items():
        if not value > 0:
            raise BadTarget(f"{name} must be above 0, got {value}")
    return Effort(**bounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        "deadline-conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"The API key, where the server wants one, is read from {KEY}.",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("--rules", action="store_true", help="print all rules, and test nothing")
    for name, options in OPTIONS.items():
        parser.add_argument(f"--{name}", **options)
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the report as JSON, too")
    given = parser.parse_args(arguments)
    if given.rules:
        print(table())
        return 0
    try:
        chosen(given.only)
        target, effort = target_of(vars(given)), effort_of(vars(given))
        report = asyncio.run(examine(target, effort, given.only))
    except (ValueError, Unusable) as error:
        print(f"deadline-conformance: {error}", file=sys.stderr)
        return NO_TEST
    if given.json:
        given.json.write_text(json.dumps(report.json(), indent=1) + "\n")
    print(report.text())
    return report.status


if __name__ == "__main__":
    sys.exit(main())
