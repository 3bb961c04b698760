"""``tidegate drain``, ``tidegate swap`` and ``tidegate reload``."""

import sys
from typing import TYPE_CHECKING

import click

from tidegate.cli.arguments import SECONDS, Command, option
from tidegate.cli.asking import asks
from tidegate.cli.terminal import print_json

if TYPE_CHECKING:
    from tidegate.client import Client
    from tidegate.operating import DrainState
    from tidegate.results import Instance

_SLACK_S = 2.0
"""Seconds after the grace period in which work that was moved or ended must be gone."""
_POLL_S = 0.1

DRAIN_DESCRIPTION = """\
Take a service, or one of its instances, out of use without losing work.

  tidegate drain                             the orchestrator: before it is stopped (preStop)
  tidegate drain --instance 10.0.0.7:8001    an instance: work that cannot end in time moves away
  tidegate drain --undo                      accept new work again

Returns when no work is left there, or the grace period is over.
"""

SWAP_DESCRIPTION = """\
Switch an instance to another model without a restart, while the others keep serving.

  tidegate swap 10.0.0.7:8001 qwen           a model that it knows (TIDEGATE_WORKER__MODELS)
  tidegate swap 10.0.0.7:8001 /models/qwen   a folder on its machine

Running work finishes first, or is moved. If the new model cannot be loaded, the old one stays.
"""

RELOAD_DESCRIPTION = """\
Reload the settings and keys of a service, as SIGHUP does; streams continue.

It lists the settings that need a restart. Invalid settings change nothing.
"""


@click.command(cls=Command, help=DRAIN_DESCRIPTION, short_help="drain without losing work")
@option("--instance", metavar="ADDRESS", help="this instance, as `GET /v2/instances` names it")
@option("--grace", type=SECONDS, default=30.0, help="time for running work")
@option("--undo", is_flag=True, help="accept new work again")
@option("--no-wait", is_flag=True, help="return at once")
@asks(operates=True)
async def drain(
    client: "Client",
    instance: str | None,
    grace: float,
    undo: bool,
    no_wait: bool,
    as_json: bool,
) -> int:
    what, operating = instance or client.base_url, client.operating
    if undo:
        taken_back = operating.undrain_instance(instance) if instance else operating.undrain()
        state: DrainState | Instance = await taken_back
        print_json(state) if as_json else print(f"{what} accepts new work")
        return 0
    state, jobs = await _drained(client, instance, grace, 0.0 if no_wait else grace + _SLACK_S)
    if as_json:
        print_json(state)
    else:
        is_done = not (jobs or no_wait)
        print(f"drained {what}" if is_done else f"draining {what}: {jobs} still run")
    if jobs and not no_wait:
        print("tidegate drain: the grace period is over, but some work still runs", file=sys.stderr)
        return 1
    return 0


async def _drained(
    client: "Client", instance: str | None, grace_s: float, wait_s: float
) -> "tuple[DrainState | Instance, int]":
    """Drain and wait; returns the final state and how much still runs."""
    import asyncio

    from tidegate.results import Instance

    now = asyncio.get_running_loop().time
    ends_at = now() + wait_s
    if instance is None:
        state = await client.operating.drain(1000 * grace_s)
        while state.live_tasks and now() < ends_at:
            await asyncio.sleep(_POLL_S)
            state = await client.operating.drain_state()
        return state, state.live_tasks
    one = await client.operating.drain_instance(instance, 1000 * grace_s)
    while one.jobs and now() < ends_at:
        await asyncio.sleep(_POLL_S)
        listed = await client.instances()
        one = next((i for i in listed if i.address == instance), Instance(instance, "gone"))
    return one, one.jobs


@click.command(cls=Command, help=SWAP_DESCRIPTION, short_help="another model, without a restart")
@click.argument("address")
@click.argument("model")
@option("--name", metavar="NAME", default="", help="name for clients of the model at a path")
@option("--set", "given", metavar="NAME=VALUE", multiple=True, help="a worker setting for it")
@option("--grace", type=SECONDS, help="time for running work (until its last deadline)")
@asks(operates=True)
async def swap(
    client: "Client",
    address: str,
    model: str,
    name: str,
    given: tuple[str, ...],
    grace: float | None,
    as_json: bool,
) -> int:
    settings = dict(setting.partition("=")[::2] for setting in given)
    if not all(settings.values()):
        raise click.UsageError("--set takes NAME=VALUE")
    grace_ms = None if grace is None else 1000 * grace
    state = await client.operating.swap(
        address, model, name=name, settings=settings, grace=grace_ms
    )
    if as_json:
        print_json(state)
        return 0
    phases = ", ".join(f"{phase} {ms:.0f} ms" for phase, ms in state.ms.items())
    how = f"after {state.total_ms / 1000:.2f} s ({phases})" if phases else "already"
    print(f"{state.address} serves {state.model} {how}")
    return 0


@click.command(cls=Command, help=RELOAD_DESCRIPTION, short_help="reload its settings")
@asks(operates=True)
async def reload(client: "Client", as_json: bool) -> int:
    done = await client.operating.reload()
    if as_json:
        print_json(done)
        return 0
    print(f"changed: {', '.join(done.changed) or 'nothing'}")
    if done.needs_restart:
        print(f"needs a restart: {', '.join(done.needs_restart)}")
    return 0
