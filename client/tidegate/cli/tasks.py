"""``tidegate tasks``."""

from typing import TYPE_CHECKING

import click

from tidegate.cli.arguments import POSITIVE, Group, option
from tidegate.cli.asking import asks
from tidegate.cli.terminal import (
    CONTROL_CHARACTERS,
    console,
    count,
    duration,
    print_facts,
    print_json,
    show_list,
)

if TYPE_CHECKING:
    from tidegate.client import Client

TASKS_DESCRIPTION = """\
Running and recent tasks of a service, without their text.

  tidegate tasks list --status running
  tidegate tasks show TASK
  tidegate tasks cancel TASK TASK
"""


@click.group(cls=Group, help=TASKS_DESCRIPTION, short_help="running and recent tasks")
def tasks() -> None:
    pass


@tasks.command("list", help="Tasks, newest first.", short_help="the latest ones")
@option(
    "--status",
    type=click.Choice(["queued", "dispatched", "running", "ended"]),
    help="only tasks with this status",
)
@option("--limit", type=POSITIVE, default=20, help="maximum number of tasks")
@asks()
async def list_tasks(client: "Client", status: str | None, limit: int, as_json: bool) -> int:
    found = await client.tasks(status=status, limit=limit)
    numbers = ("AGE", "TOOK", "LEFT", "PROMPT", "TOKENS")
    columns = ("TASK", "API", "STATUS", "MODEL", *numbers, "OUTCOME")
    rows = (
        (
            *(line.task_id, line.api, line.status, line.model),
            *map(duration, (line.age_ms, line.took_ms, line.left_ms)),
            *map(count, (line.prompt_tokens, line.completion_tokens)),
            " ".join(filter(None, [line.outcome, line.code])),
        )
        for line in found.tasks
    )
    show_list(found, columns, rows, numbers=numbers, as_json=as_json)
    if found.has_more and not as_json:
        console().print(f"… and older ones; --limit {limit * 2} shows more", style="dim")
    return 0


@tasks.command("show", help="One task, with its text so far.", short_help="one task")
@click.argument("task")
@asks()
async def show_task(client: "Client", task: str, as_json: bool) -> int:
    found = await client.status(task)
    if as_json:
        print_json(found)
        return 0
    facts = {"task": found.task_id, "status": found.status}
    if found.outcome is not None:
        why = [found.outcome, found.finish_reason, found.missed_part]
        facts["outcome"] = " · ".join(filter(None, why))
    if found.error is not None:
        facts["error"] = f"{found.error.code}: {found.error.message}"
    if found.usage is not None:
        usage = found.usage
        facts["tokens"] = f"{usage.prompt_tokens} read, {usage.completion_tokens} made"
    if found.budget is not None:
        parts = ("queue", "route", "prefill", "decode", "left")
        spent = ((part, duration(getattr(found.budget, f"{part}_ms"))) for part in parts)
        facts["budget"] = " · ".join(f"{part} {time}" for part, time in spent)
    print_facts(facts)
    if found.text:
        console().print("\n" + found.text.translate(CONTROL_CHARACTERS), soft_wrap=True)
    return 0


@tasks.command("cancel", help="Stop tasks; a task that has ended is unchanged.", short_help="stop")
@click.argument("task", nargs=-1, required=True)
@asks()
async def cancel_tasks(client: "Client", task: tuple[str, ...], as_json: bool) -> int:
    cancelled, ended = list[str](), list[str]()
    for task_id in task:
        is_over = (await client.status(task_id)).outcome is not None
        (ended if is_over else cancelled).append(task_id)
        await client.cancel(task_id)
    if as_json:
        print_json({"cancelled": cancelled, "had_ended": ended})
        return 0
    for said, ids in (("cancelled", cancelled), ("had already ended:", ended)):
        if ids:
            console().print(f"{said} {', '.join(ids)}")
    return 0
