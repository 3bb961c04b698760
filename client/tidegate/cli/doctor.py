"""``tidegate doctor``: its arguments."""

from pathlib import Path

import click

from tidegate.cli import runtime
from tidegate.cli.arguments import PORT, Choice, Command, json_option, option
from tidegate.cli.interrupt import importing

DESCRIPTION = """\
Look at this machine: what is missing, what makes it slow, and what to do about each.

  tidegate doctor
  tidegate doctor --device cuda       a GPU is a must
  tidegate doctor --json
"""

EPILOG = """\
exit status: 0 it can serve (warnings cost speed or features), 1 something keeps it from serving
"""


@click.command(cls=Command, help=DESCRIPTION, epilog=EPILOG, short_help="what this machine lacks")
@option("--device", type=Choice(["cuda", "cpu"]), help="what it is to run on (either)")
@option(
    "--triton",
    type=Path,
    metavar="PATH",
    envvar="TIDEGATE_TRITON",
    show_envvar=True,
    help="the server that would be used",
)
@option(
    "--host", default="127.0.0.1", envvar="TIDEGATE_HOST", show_envvar=True, help="to listen on"
)
@option("--port", type=PORT, default=8080, envvar="TIDEGATE_PORT", show_envvar=True, help="to take")
@json_option
def doctor(device: str | None, triton: Path | None, host: str, port: int, as_json: bool) -> int:
    with importing():
        runtime.add_to_path()
        from tidegate.cli import diagnosis

    return diagnosis.run(device, triton, host, port, as_json=as_json)
