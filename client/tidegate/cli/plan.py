"""``tidegate plan``: its arguments."""

import re
from pathlib import Path
from typing import Any

import click

from tidegate.cli import runtime
from tidegate.cli.arguments import (
    POSITIVE,
    RATE,
    Command,
    Number,
    json_option,
    option,
    server_options,
)
from tidegate.cli.interrupt import importing
from tidegate.cli.lists import ask

DESCRIPTION = """\
How many instances keep deadlines under a load, and what a tenth more load does.

  tidegate plan --deadline 2s --rps 40 --tokens 300 --prompt 500
  curl http://127.0.0.1:8080/v2/instances > recorded.json
  tidegate plan --deadline 2s --rps 40 --tokens 300 --instance recorded.json

Speeds are those that a running service has measured of its instances, or had when they were
recorded. The load is played in virtual time.
"""

EPILOG = """\
exit status: 0 there is such a number, 1 none keeps them (the reason is on stderr), 2 wrong usage
"""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|)")
_UNIT_MS = {"ms": 1.0, "s": 1000.0, "": 1000.0, "m": 60_000.0}
KEPT = Number("percent", 1, 99.9, "must be percent from 1 to 99.9", is_whole=False)
TOKENS = Number("number", 1, 10_000_000, "must be tokens from 1 to 10000000")


class DurationMs(click.ParamType[float]):
    """A time such as ``500ms``, ``2s``, ``1.5m``, or a number of seconds, as milliseconds."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = _DURATION.fullmatch(str(value).strip())
        ms = float(found[1]) * _UNIT_MS[found[2]] if found else 0.0
        if not 0 < ms < 1e10:
            self.fail(f"expected a time such as 2s, 500ms or 1.5m, got {value!r}", param, ctx)
        return ms


@click.command(cls=Command, help=DESCRIPTION, epilog=EPILOG, short_help="how many instances")
@option("--deadline", "deadline_ms", type=DurationMs(), required=True, help="for a whole answer")
@option("--rps", "per_s", type=RATE, required=True, help="requests per second")
@option("--tokens", type=TOKENS, required=True, help="of an answer")
@option("--prompt", type=TOKENS, default=100, help="tokens of a prompt that no cache has")
@option("--keep", type=KEPT, default=99, help="percent of deadlines to keep")
@option("--seed", type=POSITIVE, default=1, help="of the arrivals")
@option(
    "--instance",
    "recorded",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="figures recorded of GET /v2/instances, in place of asking --url",
)
@option("--model", help="of the instances to go by, where they have several")
@server_options
@json_option
def plan(
    deadline_ms: float,
    per_s: float,
    tokens: int,
    prompt: int,
    keep: float,
    seed: int,
    recorded: Path | None,
    model: str | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> int:
    with importing():
        runtime.add_to_path()
        from orchestrator.prediction.fleet_size import OfferedLoad
        from orchestrator.prediction.step_model import Work
        from tidegate.cli import planning

    load = OfferedLoad(per_s, deadline_ms, Work(prompt, 0, tokens))
    options = planning.PlanOptions(load, keep / 100, seed, model, as_json)
    if recorded is not None:
        return planning.plan_recorded(recorded, options)
    return ask("plan", url, token, lambda client: planning.plan_service(client, options))
