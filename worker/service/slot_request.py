"""A request of the slot model: the input ``recipe``, and parameters."""

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from worker.errors import InvalidCall
from worker.media.recipe import Recipe, read_recipe
from worker.service.call import Call

RECIPE: Final = "recipe"
OUTPUTS: Final = ("mp4", "wav", "png", "video", "audio", "actor")
"""What a result can carry: files, and the tensors that they are made of."""
DEFAULT_OUTPUTS: Final = ("mp4",)


class _Parameters(msgspec.Struct, forbid_unknown_fields=True):
    deadline_ms: float | None = None
    on_deadline: Literal["error", "degrade"] = "error"
    outputs: str = ",".join(DEFAULT_OUTPUTS)
    """Names of ``OUTPUTS``, by commas."""
    preview: bool = False
    """Whether some answers carry a small picture of what there is so far."""
    keep_on: bool = False
    """Nothing but its deadline stops it, though it be certain to be late: its result says so as
    ``spared``. For a sample of clips, which shows how often an early end is wrong (DL-17)."""
    watch: bool = False
    """No clip: the model's state, again and again (``worker.protocol.slot``)."""


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """``deadline_s``: from its receipt on."""

    recipe: Recipe
    deadline_s: float
    degrade: bool
    outputs: tuple[str, ...]
    preview: bool = False
    keep_on: bool = False


def parse_slot(call: Call, default_deadline_s: float) -> SlotRequest | None:
    """None for a request that watches. Raises ``InvalidCall`` and ``RecipeError``."""
    data = call.data(RECIPE)
    if data is None:
        raise InvalidCall(f"input {RECIPE} is missing")
    try:
        stated = msgspec.convert(dict(call.parameters), _Parameters, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidCall(f"parameters: {error}") from None
    if stated.watch:
        return None
    deadline_s = default_deadline_s if stated.deadline_ms is None else stated.deadline_ms / 1000
    if not 0 < deadline_s < float("inf"):
        raise InvalidCall("deadline_ms must be a positive number of milliseconds")
    outputs = tuple(filter(None, (name.strip() for name in stated.outputs.split(","))))
    for name in outputs:
        if name not in OUTPUTS:
            raise InvalidCall(f"outputs: there is no {name!r}; there is {', '.join(OUTPUTS)}")
    return SlotRequest(
        read_recipe(data),
        deadline_s,
        stated.on_deadline == "degrade",
        outputs,
        stated.preview,
        stated.keep_on,
    )
