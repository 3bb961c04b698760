"""``tidegate plan``: reads what was measured of instances, and prints what it comes to.

Imported after ``runtime.add_to_path``, which finds ``orchestrator``.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgspec

from orchestrator.prediction.fleet_size import (
    FleetEstimate,
    FleetPlan,
    OfferedLoad,
    PlanError,
    plan_fleet,
)
from orchestrator.prediction.step_learner import LEARNT_STEPS
from orchestrator.prediction.step_model import StepModel
from tidegate.cli.terminal import console, count, duration, print_json, share, table
from tidegate.client import Client
from tidegate.listings import Instance, InstanceList, InstancePace


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is asked for; ``keep`` is a share of deadlines."""

    load: OfferedLoad
    keep: float
    seed: int
    model: str | None
    as_json: bool


async def plan_service(client: Client, options: PlanOptions) -> int:
    """Plan with what a running service has measured; returns the exit status."""
    return _show(await client.instances(), options)


def plan_recorded(path: Path, options: PlanOptions) -> int:
    """Plan with what was recorded; returns the exit status."""
    return _show(read_recorded(path), options)


def read_recorded(path: Path) -> Sequence[Instance]:
    """The instances in a file: an answer of ``GET /v2/instances`` or ``/v2/instances/ADDRESS``.
    Raises ``click.ClickException``."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror}") from None
    try:
        if "instances" in msgspec.json.decode(data, type=dict[str, object]):
            return msgspec.json.decode(data, type=InstanceList).instances
        return [msgspec.json.decode(data, type=Instance)]
    except msgspec.MsgspecError as error:
        raise click.ClickException(
            f"{path} is not a response of GET /v2/instances: {error}"
        ) from None


def _show(instances: Sequence[Instance], options: PlanOptions) -> int:
    instance, pace = _slowest(instances, options.model)
    model = StepModel(
        slots=pace.slots,
        step_tokens=pace.step_tokens,
        base_ms=pace.base_ms,
        row_ms=pace.row_ms,
        prompt_token_ms=pace.prompt_token_ms,
        ratios=(pace.ratio, pace.ratio),
    )
    try:
        found = plan_fleet(model, options.load, options.keep, options.seed)
    except PlanError as error:
        raise click.ClickException(str(error)) from None
    assumed = _assumptions(instance, pace, options)
    if options.as_json:
        print_json({"plan": asdict(found), "pace": pace, "assumptions": assumed})
        return 0
    out = console()
    out.print(_in_words(found, options))
    columns = ("LOAD", "INSTANCES", "KEPT", "ROWS", "BUSY", "WAIT P95", "ANSWER P95")
    more = options.load.times(1.1).per_s
    rows = [
        _line(f"{options.load.per_s:g}/s", found.enough),
        _line(f"{more:g}/s", found.with_more),
    ]
    if found.enough_for_more.instances > found.enough.instances:
        rows.append(_line(f"{more:g}/s", found.enough_for_more))
    out.print(table(columns, rows, numbers=columns[1:]))
    out.print("\nAssumed:")
    for one in assumed:
        out.print(f"- {one}", soft_wrap=True)
    return 0


def _slowest(instances: Sequence[Instance], model: str | None) -> tuple[Instance, InstancePace]:
    """The slowest of the measured instances of ``model``. Raises ``click.ClickException``."""
    names = sorted({one.model for one in instances if one.model})
    if model is not None and model not in names:
        has = f"there are {', '.join(names)}" if names else "none tells of one"
        raise click.ClickException(f"no instance has the model {model!r}: {has}")
    if model is None and len(names) > 1:
        raise click.ClickException(f"name one of several models with --model: {', '.join(names)}")
    paces = [
        (one, one.prediction.pace)
        for one in instances
        if (model is None or one.model == model)
        and one.prediction is not None
        and one.prediction.pace is not None
    ]
    if not paces:
        raise click.ClickException(
            "no instance has measured steps (prediction.pace is missing or null): let it serve "
            "some requests first"
        )
    for one, pace in paces:
        _check(one, pace)
    return max(paces, key=lambda pair: pair[1].ratio * _full_step_ms(pair[1]))


def _check(instance: Instance, pace: InstancePace) -> None:
    """Raises ``click.ClickException`` for figures that no instance can have."""
    times = (pace.base_ms, pace.row_ms, pace.prompt_token_ms)
    if pace.slots < 1 or pace.step_tokens < 1 or min(times) < 0 or _full_step_ms(pace) <= 0:
        raise click.ClickException(
            f"prediction.pace of {instance.address} cannot be: slots and step_tokens are at least "
            "1, times not negative and not all 0"
        )
    if not 0 < pace.ratio < 1000:
        raise click.ClickException(f"prediction.pace.ratio of {instance.address} must be above 0")


def _full_step_ms(pace: InstancePace) -> float:
    """Time of a step in which all slots are taken, for each of them."""
    return pace.base_ms / pace.slots + pace.row_ms


def _in_words(plan: FleetPlan, options: PlanOptions) -> str:
    enough, more = plan.enough, plan.enough_for_more
    kept = f"{100 * options.keep:g} %"
    text = f"{_instances(enough.instances)} {_verb(enough)} {kept} of deadlines."
    if more.instances == enough.instances:
        return f"{text} A tenth more load needs no more.\n"
    return (
        f"{text} With a tenth more load they would keep {share(plan.with_more.kept)}: "
        f"for {kept} it takes {more.instances}.\n"
    )


def _instances(number: int) -> str:
    return "1 instance" if number == 1 else f"{number} instances"


def _verb(found: FleetEstimate) -> str:
    return "keeps" if found.instances == 1 else "keep"


def _line(load: str, found: FleetEstimate) -> tuple[str, ...]:
    return (
        load,
        count(found.instances),
        share(found.kept),
        count(found.rows),
        share(found.busy),
        duration(found.wait_p95_ms),
        duration(found.total_p95_ms),
    )


def _assumptions(instance: Instance, pace: InstancePace, options: PlanOptions) -> list[str]:
    work = options.load.work
    assumed = [
        f"requests come at random (Poisson), {work.prompt_tokens} tokens of prompt that no cache "
        f"has and {work.output_tokens} of answer each: where these differ, plan for the longest "
        "that must be kept",
        f"every instance is like {instance.address}: {pace.slots} slots, a step takes "
        f"{pace.base_ms:g} ms + {pace.row_ms:g} ms a row + {pace.prompt_token_ms:g} ms a prompt "
        f"token, times {pace.ratio:g}",
        "KV memory holds as many texts as there are slots; what is certain to be late is refused",
        "all instances serve: add those that you can lose",
    ]
    steps = instance.prediction.steps if instance.prediction is not None else 0
    if steps < LEARNT_STEPS:
        assumed.append(
            f"only {steps} steps were measured: let it serve for longer, or these figures are rough"
        )
    return assumed
