"""Tools that a model may call, and its calls in earlier turns of a chat."""

from collections.abc import Mapping

import msgspec

JsonObject = Mapping[str, object]
"""What JSON's objects decode to."""


class Tool(msgspec.Struct, frozen=True):
    """One that the model is told of. ``parameters`` is a JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: JsonObject | None = None
    strict: bool = False
    """Its arguments must match the schema, whatever the model would like to write."""
    chars: int = 0
    """About how long it is as JSON."""

    def stated(self) -> JsonObject:
        """As templates have it."""
        function: dict[str, object] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class ToolCall(msgspec.Struct, frozen=True):
    """What the model has called in an earlier turn."""

    id: str
    name: str
    arguments: JsonObject
    chars: int = 0
    """About how long it is as JSON."""

    def stated(self) -> JsonObject:
        """As templates have it: arguments are no text."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}
