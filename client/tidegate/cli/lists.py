"""``tidegate tasks`` and ``tidegate sessions``: their arguments."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from tidegate.cli.arguments import (
    POSITIVE,
    Choice,
    Group,
    json_option,
    option,
    server_options,
)
from tidegate.cli.completing import session_ids, task_ids
from tidegate.cli.interrupt import importing

if TYPE_CHECKING:
    from tidegate.client import Client

TASKS_DESCRIPTION = """\
What a service works on, and what it has done: without a word of what was asked or answered.

  tidegate tasks list --status running
  tidegate tasks show TASK
  tidegate tasks cancel TASK TASK
"""

SESSIONS_DESCRIPTION = """\
Conversations that a service keeps for its clients, with their KV.

  tidegate sessions list
  tidegate sessions show SESSION
  tidegate sessions delete SESSION SESSION
"""


@click.group(
    cls=Group, help=TASKS_DESCRIPTION, short_help="what it works on", no_args_is_help=False
)
def tasks() -> None:
    pass


@tasks.command("list", help="Tasks, newest first.", short_help="the latest ones")
@server_options
@option(
    "--status",
    type=Choice(["queued", "dispatched", "running", "ended"]),
    help="only those that stand there",
)
@option("--limit", type=POSITIVE, default=20, help="so many at most")
@json_option
def list_tasks(url: str, token: str | None, status: str | None, limit: int, as_json: bool) -> int:
    with importing():
        from tidegate.cli import show
    return ask(
        "tasks list",
        url,
        token,
        lambda client: show.tasks(client, status=status, limit=limit, as_json=as_json),
    )


@tasks.command("show", help="One task, with its text so far.", short_help="one task")
@click.argument("task", shell_complete=task_ids)
@server_options
@json_option
def show_task(url: str, token: str | None, task: str, as_json: bool) -> int:
    with importing():
        from tidegate.cli import show
    return ask("tasks show", url, token, lambda client: show.task(client, task, as_json=as_json))


@tasks.command("cancel", help="Stop tasks; one that has ended stays as it is.", short_help="stop")
@click.argument("task", nargs=-1, required=True, shell_complete=task_ids)
@server_options
@json_option
def cancel_tasks(url: str, token: str | None, task: tuple[str, ...], as_json: bool) -> int:
    with importing():
        from tidegate.cli import show
    return ask("tasks cancel", url, token, lambda client: show.cancel(client, task, as_json))


@click.group(
    cls=Group, help=SESSIONS_DESCRIPTION, short_help="conversations", no_args_is_help=False
)
def sessions() -> None:
    pass


@sessions.command("list", help="Sessions, oldest first.", short_help="all of them")
@server_options
@json_option
def list_sessions(url: str, token: str | None, as_json: bool) -> int:
    with importing():
        from tidegate.cli import show
    return ask("sessions list", url, token, lambda client: show.sessions(client, as_json=as_json))


@sessions.command("show", help="One session, with what was said.", short_help="one session")
@click.argument("session", shell_complete=session_ids)
@server_options
@json_option
def show_session(url: str, token: str | None, session: str, as_json: bool) -> int:
    with importing():
        from tidegate.cli import show
    return ask(
        "sessions show", url, token, lambda client: show.session(client, session, as_json=as_json)
    )


@sessions.command(
    "delete", help="Forget sessions; a turn that runs is cancelled.", short_help="forget"
)
@click.argument("session", nargs=-1, required=True, shell_complete=session_ids)
@server_options
@json_option
def delete_sessions(url: str, token: str | None, session: tuple[str, ...], as_json: bool) -> int:
    with importing():
        from tidegate.cli import show
    return ask("sessions delete", url, token, lambda client: show.delete(client, session, as_json))


def ask(
    command: str, url: str, token: str | None, action: Callable[["Client"], Awaitable[int]]
) -> int:
    """Run ``action`` against a service; returns the exit status."""
    with importing():
        from tidegate.cli import asking
    return asking.ask(command, url, token, action)
