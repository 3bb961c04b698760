"""``tidegate pool``: its commands and their arguments."""

from pathlib import Path

import click

from tidegate.cli.arguments import Group, json_option, option
from tidegate.cli.runtime import importing

DESCRIPTION = """\
Keep the Triton instances of a machine as a file asks for them.

  tidegate pool run pool.toml        start it and keep it up
  tidegate pool status               how each instance is
  tidegate pool reload               read the file again (it is also watched)
  tidegate pool stop                 drain and end everything

docs/pool.md has an example of the file, and what each of its keys means.
"""

RUN_DESCRIPTION = """\
Start the instances of a file and keep them up, until SIGINT or SIGTERM: then running work gets
drain_s, and everything ends. A second signal hurries it.

An instance that is lost is started again on its ports; one that keeps failing, once a minute. If
this command is killed its instances keep serving, and the next one finds them. The file is watched,
and SIGHUP reads it again: what is new starts, what is gone is drained and ends, what has changed is
replaced. A file that does not fit changes nothing.
"""

STOP_DESCRIPTION = """\
End every instance and the manager, drained; also when the manager is gone.

  tidegate pool stop --now      running work is cut
  tidegate pool stop --leave    the manager only: its instances keep serving for the next one
"""

_FILE = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
_MAYBE_FILE = click.argument(
    "file", type=click.Path(path_type=Path, dir_okay=False), required=False
)


def _do(what: str, *given: object, **options: object) -> int:
    with importing(serving=True):
        from pool import pool_command
    status: int = getattr(pool_command, what)(*given, **options)
    return status


@click.group(cls=Group, help=DESCRIPTION, short_help="keep a machine's instances as a file says")
def pool() -> None:
    pass


@pool.command("run", help=RUN_DESCRIPTION, short_help="start it, keep it up")
@_FILE
def run(file: Path) -> int:
    return _do("run", file)


@pool.command(
    "status",
    help="Show each instance. FILE names the pool if it has its own home.",
    short_help="how each instance is",
)
@_MAYBE_FILE
@json_option
def status(file: Path | None, as_json: bool) -> int:
    return _do("status", file, as_json=as_json)


@pool.command(
    "reload",
    help="Make the manager read its file again; GPUs that were taken out are tried again.",
    short_help="read the file again",
)
@_MAYBE_FILE
def reload(file: Path | None) -> int:
    return _do("reload", file)


@pool.command("stop", help=STOP_DESCRIPTION, short_help="drain and end it")
@_MAYBE_FILE
@option("--now", is_flag=True, help="cut what runs")
@option("--leave", is_flag=True, help="end the manager only")
def stop(file: Path | None, now: bool, leave: bool) -> int:
    if now and leave:
        raise click.UsageError("--now and --leave are two ends; give one of them")
    return _do("stop", file, "now" if now else "leave" if leave else "drain")
