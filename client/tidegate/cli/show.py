"""``tidegate models``, ``tidegate tasks`` and ``tidegate sessions``: what they print."""

from collections.abc import Sequence

from tidegate.cli.terminal import CONTROL_CHARACTERS, console, count, duration, print_json, table
from tidegate.client import Client
from tidegate.listings import Instance, TaskLine
from tidegate.results import TaskStatus
from tidegate.sessions import SessionInfo

_PAGE = 100


async def models(client: Client, *, as_json: bool) -> int:
    served, instances = await client.model_infos(), await client.instances()
    if as_json:
        print_json(
            [
                {
                    "model": model.id,
                    "max_model_len": model.max_model_len,
                    "instances": [i.address for i in instances if i.model == model.id],
                }
                for model in served
            ]
        )
        return 0
    columns = ("MODEL", "CONTEXT", "INSTANCES", "DEVICE", "TOKENS/S", "FIRST TOKEN")
    rows = [_model(name.id, name.max_model_len, instances) for name in served]
    console().print(table(columns, rows, numbers=columns[1:3] + columns[4:]))
    return 0


def _model(name: str, context: int | None, instances: Sequence[Instance]) -> tuple[str, ...]:
    its = [instance for instance in instances if instance.model == name]
    paces = [i.perf_tokens_per_s for i in its if i.perf_tokens_per_s is not None]
    firsts = [i.first_token_ms for i in its if i.first_token_ms is not None]
    return (
        name,
        count(context),
        f"{sum(instance.ready for instance in its)}/{len(its)}",
        ", ".join(sorted({instance.device or "–" for instance in its})) or "–",
        count(sum(paces) if paces else None),
        duration(min(firsts, default=None)),
    )


async def tasks(client: Client, *, status: str | None, limit: int, as_json: bool) -> int:
    found = await client.tasks(status=status, limit=limit)
    if as_json:
        print_json(found)
        return 0
    columns = (
        "TASK",
        "API",
        "STATUS",
        "MODEL",
        "AGE",
        "TOOK",
        "LEFT",
        "PROMPT",
        "TOKENS",
        "OUTCOME",
    )
    out = console()
    out.print(table(columns, [_task(line) for line in found.tasks], numbers=columns[4:9]))
    if found.has_more:
        out.print(f"… and older ones; --limit {limit * 2} shows more", style="dim")
    return 0


def _task(line: TaskLine) -> tuple[str, ...]:
    return (
        line.task_id,
        line.api,
        line.status,
        line.model,
        duration(line.age_ms),
        duration(line.took_ms),
        duration(line.left_ms),
        count(line.prompt_tokens),
        count(line.completion_tokens),
        " ".join(filter(None, [line.outcome, line.code])),
    )


async def task(client: Client, task_id: str, *, as_json: bool) -> int:
    found = await client.status(task_id)
    if as_json:
        print_json(found)
        return 0
    out = console()
    for name, value in _facts(found):
        out.print(f"{name:<12}{value}")
    if found.text:
        out.print()
        out.print(found.text.translate(CONTROL_CHARACTERS), soft_wrap=True)
    return 0


def _facts(found: TaskStatus) -> list[tuple[str, str]]:
    facts = [("task", found.task_id), ("status", found.status)]
    if found.outcome is not None:
        why = [found.finish_reason, found.missed_part]
        facts.append(("outcome", " · ".join(filter(None, [found.outcome, *why]))))
    if found.error is not None:
        facts.append(("error", f"{found.error.code}: {found.error.message}"))
    if found.usage is not None:
        usage = found.usage
        facts.append(("tokens", f"{usage.prompt_tokens} read, {usage.completion_tokens} made"))
    if found.budget is not None:
        parts = {
            "queue": found.budget.queue_ms,
            "route": found.budget.route_ms,
            "prefill": found.budget.prefill_ms,
            "decode": found.budget.decode_ms,
            "left": found.budget.left_ms,
        }
        facts.append(("budget", " · ".join(f"{k} {duration(v)}" for k, v in parts.items())))
    return facts


async def cancel(client: Client, task_ids: Sequence[str], as_json: bool) -> int:
    for task_id in task_ids:
        await client.cancel(task_id)
    if as_json:
        print_json({"cancelled": list(task_ids)})
    else:
        console().print(f"cancelled {', '.join(task_ids)}")
    return 0


async def sessions(client: Client, *, as_json: bool) -> int:
    found: list[SessionInfo] = []
    after: int | None = 0
    while after is not None:
        page = await client.sessions.list(limit=_PAGE, after=after)
        found += page.sessions
        after = page.next_after
    if as_json:
        print_json(found)
        return 0
    columns = ("SESSION", "STATUS", "MODEL", "TURNS", "BYTES", "EXPIRES IN")
    rows = [
        (
            each.session_id,
            each.status,
            each.model or "–",
            count(each.turns),
            count(each.bytes),
            duration(None if each.expires_in_s is None else 1000 * each.expires_in_s),
        )
        for each in found
    ]
    console().print(table(columns, rows, numbers=columns[3:]))
    return 0


async def session(client: Client, session_id: str, *, as_json: bool) -> int:
    found = await client.sessions.get(session_id)
    if as_json:
        print_json(found)
        return 0
    out = console()
    out.print(f"session     {found.session_id}")
    out.print(f"status      {found.status}, {found.turns} turns")
    for message in found.messages:
        out.print()
        out.print(f"{message['role']}:", style="bold")
        out.print(message["content"].translate(CONTROL_CHARACTERS), soft_wrap=True)
    if found.prompt:
        out.print()
        out.print(found.prompt.translate(CONTROL_CHARACTERS), soft_wrap=True)
    if found.prompt_token_ids:
        out.print(f"tokens      {len(found.prompt_token_ids)}")
    return 0


async def delete(client: Client, session_ids: Sequence[str], as_json: bool) -> int:
    for session_id in session_ids:
        await client.sessions.delete(session_id)
    if as_json:
        print_json({"deleted": list(session_ids)})
    else:
        console().print(f"deleted {', '.join(session_ids)}")
    return 0
