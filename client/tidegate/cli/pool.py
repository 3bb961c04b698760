"""``tidegate pool``: its commands and their arguments."""

import sys
from pathlib import Path
from typing import Any

import click

from tidegate.cli.arguments import Group, json_option, option
from tidegate.cli.runtime import importing
from tidegate.cli.terminal import show_list

DESCRIPTION = """\
Run the Triton instances of a machine as a file defines them.

  tidegate pool run pool.toml        start it and keep it up
  tidegate pool status               show the state of each instance
  tidegate pool reload               read the file again (it is also watched)
  tidegate pool stop                 drain and end everything

docs/pool.md has an example of the file, and explains each key.
"""

RUN_DESCRIPTION = """\
Start the instances of a file and keep them up until SIGINT or SIGTERM. Then running work gets
drain_s, and everything ends. A second signal shortens the wait.

A lost instance is restarted on its ports; one that keeps failing is restarted once a minute. If
this command is killed, its instances keep serving, and the next run finds them. The command watches
the file, and SIGHUP reloads it: new instances start, removed ones are drained and end, changed ones
are replaced. An invalid file changes nothing.
"""

STOP_DESCRIPTION = """\
Drain and end every instance, then end the manager. Works without a manager, too.

  tidegate pool stop --now      cut running work off
  tidegate pool stop --leave    the manager only: its instances keep serving for the next one
"""

_PATH = click.Path(path_type=Path, dir_okay=False)
_MAYBE_FILE = click.argument("file", type=_PATH, required=False)


def _do(what: str, *given: object) -> Any:
    """The result of the command ``what``. Exits with 1 if it fails."""
    with importing(serving=True):
        import asyncio

        from catalog.errors import ProvisionError
        from pool import pool_command
    try:
        return asyncio.run(getattr(pool_command, what)(*given))
    except ProvisionError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        raise SystemExit(1) from None


@click.group(cls=Group, help=DESCRIPTION, short_help="run a machine's instances from a file")
def pool() -> None:
    pass


@pool.command("run", help=RUN_DESCRIPTION, short_help="start it, keep it up")
@click.argument("file", type=_PATH)
def run(file: Path) -> None:
    _do("run", file)


@pool.command(
    "status",
    help="Show the state of each instance. FILE names the pool if it has its own home.",
    short_help="show the state of each instance",
)
@_MAYBE_FILE
@json_option
def status(file: Path | None, as_json: bool) -> int:
    told = _do("status", file)
    if why := told.pop("error", ""):
        print(f"tidegate: {why}", file=sys.stderr)
    rows = (
        (
            *(each["name"], each["state"], each["address"] or each["where"]),
            *(str(each["pid"] or ""), str(each["restarts"]), each["reason"]),
        )
        for each in told["instances"]
    )
    columns = ("NAME", "STATE", "ADDRESS", "PID", "RESTARTS", "WHY")
    show_list(told, columns, rows, numbers=columns[3:5], as_json=as_json)
    if not as_json:
        for name, reason in told["targets_failing"].items():
            print(f"cannot tell {name}: {reason}")
    return 1 if why else 0


@pool.command(
    "reload",
    help="Make the manager reload its file.",
    short_help="reload the file",
)
@_MAYBE_FILE
def reload(file: Path | None) -> None:
    for what, names in _do("reload", file).items():
        print(f"{what}: {', '.join(names) or 'nothing'}")


@pool.command("stop", help=STOP_DESCRIPTION, short_help="drain and end it")
@_MAYBE_FILE
@option("--now", is_flag=True, help="cut running work off")
@option("--leave", is_flag=True, help="end the manager only")
def stop(file: Path | None, now: bool, leave: bool) -> None:
    if now and leave:
        raise click.UsageError("--now and --leave exclude each other; give only one")
    _do("stop", file, "now" if now else "leave" if leave else "drain")
    print("ended")
