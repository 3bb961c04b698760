"""``tidegate drain`` and ``tidegate reload``: what they do and print."""

import asyncio
import sys
from datetime import timedelta

from tidegate.cli.terminal import print_json
from tidegate.client import Client
from tidegate.listings import Instance
from tidegate.operating import DrainState

SLACK_S = 2.0
"""Seconds that work moved or ended at the end of the grace has to be gone."""
_POLL_S = 0.1
FAILED = 1


async def drain(
    client: Client, instance: str | None, grace_s: float, wait_s: float, *, as_json: bool
) -> int:
    """Drain an instance, or the orchestrator if none is named; fails with work left after
    ``wait_s``."""
    state: DrainState | Instance
    grace = timedelta(seconds=grace_s)
    if instance is None:
        state = await client.operating.drain(grace)
    else:
        state = await client.operating.drain_instance(instance, grace)
    ends_at = asyncio.get_running_loop().time() + wait_s
    while _jobs(state) and asyncio.get_running_loop().time() < ends_at:
        await asyncio.sleep(_POLL_S)
        state = await _look(client, instance)
    jobs = _jobs(state)
    if as_json:
        print_json(state)
    elif wait_s and not jobs:
        print(f"drained {instance or client.base_url}")
    else:
        print(f"draining {instance or client.base_url}: {jobs} still run")
    if wait_s and jobs:
        print("tidegate drain: the grace is over, and not all has ended", file=sys.stderr)
        return FAILED
    return 0


async def undo(client: Client, instance: str | None, *, as_json: bool) -> int:
    state: DrainState | Instance
    if instance is None:
        state = await client.operating.undrain()
    else:
        state = await client.operating.undrain_instance(instance)
    if as_json:
        print_json(state)
    else:
        print(f"{instance or client.base_url} takes new work")
    return 0


async def reload(client: Client, *, as_json: bool) -> int:
    done = await client.operating.reload()
    if as_json:
        print_json(done)
        return 0
    print(f"changed: {', '.join(done.changed) or 'nothing'}")
    if done.needs_restart:
        print(f"needs a restart: {', '.join(done.needs_restart)}")
    return 0


async def _look(client: Client, instance: str | None) -> DrainState | Instance:
    if instance is None:
        return await client.operating.drain_state()
    found = [one for one in await client.instances() if one.address == instance]
    return found[0] if found else Instance(instance, "gone")


def _jobs(state: DrainState | Instance) -> int:
    return state.live_tasks if isinstance(state, DrainState) else state.jobs
