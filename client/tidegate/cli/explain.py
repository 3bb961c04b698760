"""``tidegate explain``: its arguments."""

import click

from tidegate.cli.arguments import Command, json_option, server_options
from tidegate.cli.completing import task_ids
from tidegate.cli.interrupt import importing
from tidegate.cli.lists import ask

DESCRIPTION = """\
Why a request missed its deadline or was refused, and what alone would have met it.

  tidegate explain TASK          by its task id, its answer's id, or its correlation id

The service replays what was recorded around it, which takes some seconds, and says how many of the
recorded outcomes the replay comes to.
"""


@click.command(cls=Command, help=DESCRIPTION, short_help="why a request missed its deadline")
@click.argument("task", shell_complete=task_ids)
@server_options
@json_option
def explain(task: str, url: str, token: str | None, as_json: bool) -> int:
    with importing():
        from tidegate.cli import explaining
    return ask(
        "explain", url, token, lambda client: explaining.explain(client, task, as_json=as_json)
    )
