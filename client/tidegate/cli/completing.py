"""Shell completion of names that only a service knows: models, tasks, sessions.

Somebody waits for it at the keyboard: it is quick or silent.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from tidegate.cli.arguments import DEFAULT_URL

if TYPE_CHECKING:
    from tidegate.sync import SyncClient

_MAX_S = 0.5
_MAX = 50


def model_names(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return _ask(ctx, incomplete, lambda client: [(name, "") for name in client.models()])


def models_here(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Models of this machine's catalog; no service is asked."""
    from tidegate.cli import runtime

    runtime.add_to_path()
    from catalog.errors import ProvisionError
    from catalog.models import ModelCatalog
    from catalog.paths import state_dir

    try:
        known = [(entry.name, entry.state.value) for entry in ModelCatalog(state_dir()).entries()]
    except ProvisionError:
        return []
    return [
        CompletionItem(name, help=state) for name, state in known if name.startswith(incomplete)
    ]


def task_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _ask(
        ctx,
        incomplete,
        lambda client: [
            (task.task_id, task.outcome or task.status) for task in client.tasks(limit=_MAX).tasks
        ],
    )


def session_ids(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return _ask(
        ctx,
        incomplete,
        lambda client: [
            (each.session_id, f"{each.turns} turns")
            for each in client.sessions.list(limit=_MAX).sessions
        ],
    )


def _ask(
    ctx: click.Context,
    incomplete: str,
    names: "Callable[[SyncClient], list[tuple[str, str]]]",
) -> list[CompletionItem]:
    from tidegate import SyncClient, TidegateError, deadline
    from tidegate.retries import NO_RETRIES

    url = ctx.params.get("url") or os.environ.get("TIDEGATE_URL") or DEFAULT_URL
    token = ctx.params.get("token") or os.environ.get("TIDEGATE_TOKEN")
    try:
        with SyncClient(url, token=token, retries=NO_RETRIES) as client, deadline(_MAX_S):
            known = names(client)
    except (TidegateError, ValueError):
        return []
    return [
        CompletionItem(name, help=about or None)
        for name, about in known
        if name.startswith(incomplete)
    ]
