"""The body of a submission to ``/v2/slots``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from clips.plan.recipe import MAJOR, MAX_TEXT, MINOR
from orchestrator.tasks.job import OnDisconnect

_RECIPE_SCHEMA = {
    "type": "object",
    "properties": {
        "schema": {"type": "string", "enum": [f"{MAJOR}.{minor}" for minor in range(MINOR + 1)]},
        "text": {"type": "string", "minLength": 1, "maxLength": MAX_TEXT},
    },
    "required": ["schema", "text"],
}
"""Schema of a recipe in the OpenAPI document; docs/slot.md has the rest."""


class ClipBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of a new slot. ``recipe`` is read by the worker's own rules (docs/slot.md)."""

    recipe: Annotated[msgspec.Raw, Meta(extra_json_schema=_RECIPE_SCHEMA)]
    model: str = "slot"
    deadline_ms: float | None = None
    on_deadline: Literal["error", "degrade"] = "error"
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE
    outputs: tuple[Literal["mp4", "wav", "png"], ...] = ("mp4",)
    preview: bool = False
