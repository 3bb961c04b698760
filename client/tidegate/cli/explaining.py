"""``tidegate explain``: what it prints."""

from tidegate.cli.terminal import console, duration, print_json
from tidegate.client import Client


async def explain(client: Client, task_id: str, *, as_json: bool) -> int:
    found = await client.explain(task_id)
    if as_json:
        print_json(found)
        return 0
    out = console()
    why = " · ".join(filter(None, [found.outcome, found.code, found.stage]))
    out.print(f"{found.task_id}: {why}")
    out.print(found.reason, soft_wrap=True)
    for moment in found.timeline:
        name = moment.event.replace("_", " ")
        out.print(f"{duration(moment.at_ms):>10}  {name:<12}{moment.detail}".rstrip(), style="dim")
    if found.verdict is not None:
        out.print(found.verdict, soft_wrap=True)
    if found.would_not:
        out.print(f"would not have: {'; '.join(one.text for one in found.would_not)}")
    if found.not_tried:
        names = ", ".join(name.replace("_", " ") for name in found.not_tried)
        out.print(f"not tried, for want of time: {names}")
    return 0
