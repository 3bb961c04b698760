"""A request of the slot model: the input ``recipe``, and parameters."""

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from clips.plan.recipe import Recipe, read_recipe
from worker.errors import InvalidCall
from worker.service.call import Call

RECIPE: Final = "recipe"
OUTPUTS: Final = ("mp4", "wav", "png", "video", "audio", "actor")
"""Outputs of a result: files, and the tensors behind them."""
DEFAULT_OUTPUTS: Final = ("mp4",)
DEFAULT_DEADLINE_S: Final = 45.0
"""Default deadline in seconds from receipt (SL-1)."""


class _Parameters(msgspec.Struct, forbid_unknown_fields=True):
    deadline_ms: float | None = None
    on_deadline: Literal["error", "degrade"] = "error"
    outputs: str = ",".join(DEFAULT_OUTPUTS)
    """Names of ``OUTPUTS``, separated by commas."""
    keep_on: bool = False
    """Whether only its deadline stops it, even if it is certain to be late; its result then says
    ``spared``. Used for a sample, to see how often an early end is wrong (DL-17)."""
    watch: bool = False
    """Whether to send the model's state regularly instead of a clip (``clips.state``)."""


@dataclass(frozen=True, slots=True)
class RenderRequest:
    """A parsed request for a clip. ``deadline_s`` is relative to its receipt."""

    recipe: Recipe
    deadline_s: float
    degrade: bool
    outputs: tuple[str, ...]
    keep_on: bool = False


def parse_clip(call: Call) -> RenderRequest | None:
    """Parse a request; None if it only watches. Raises ``InvalidCall`` and ``RecipeError``."""
    data = call.data(RECIPE)
    if data is None:
        raise InvalidCall(f"input {RECIPE} is missing")
    try:
        stated = msgspec.convert(dict(call.parameters), _Parameters, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidCall(f"parameters: {error}") from None
    if stated.watch:
        return None
    deadline_s = DEFAULT_DEADLINE_S if stated.deadline_ms is None else stated.deadline_ms / 1000
    if not 0 < deadline_s < float("inf"):
        raise InvalidCall("deadline_ms must be a positive number of milliseconds")
    outputs = tuple(filter(None, (name.strip() for name in stated.outputs.split(","))))
    for name in outputs:
        if name not in OUTPUTS:
            raise InvalidCall(f"outputs: there is no {name!r}; there is {', '.join(OUTPUTS)}")
    return RenderRequest(
        read_recipe(data),
        deadline_s,
        stated.on_deadline == "degrade",
        outputs,
        stated.keep_on,
    )
