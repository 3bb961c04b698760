"""``tidegate top``: its arguments."""

import click

from tidegate.cli.arguments import (
    SECONDS,
    Command,
    json_option,
    option,
    server_options,
)
from tidegate.cli.interrupt import importing

TOP_DESCRIPTION = """\
A service as it works: instances, queue, outcomes, goodput, KV. Ctrl-C leaves.

  tidegate top
  tidegate top --once            one picture, of the next second, for scripts and pipes
  tidegate top --json            the same as JSON
"""


@click.command(cls=Command, help=TOP_DESCRIPTION, short_help="watch it work")
@server_options
@option("--every", type=SECONDS, default=1.0, metavar="S", help="seconds between two looks")
@option("--once", is_flag=True, help="one picture, then leave")
@json_option
def top(url: str, token: str | None, every: float, once: bool, as_json: bool) -> int:
    with importing():
        from tidegate.cli import asking, watch
    try:
        return asking.ask(
            "top",
            url,
            token,
            lambda client: watch.run(client, url, every_s=every, once=once, as_json=as_json),
        )
    except KeyboardInterrupt:  # the way out
        return 0
