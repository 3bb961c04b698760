"""Tools that a model may call, and its calls in earlier turns of a chat."""

import json
from collections.abc import Mapping

import msgspec

JsonObject = Mapping[str, object]


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may see. ``parameters`` is a JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: JsonObject | None = None
    strict: bool = False
    """Whether a grammar makes its arguments match the schema."""
    chars: int = 0
    """Approximate length of the tool as JSON, in characters."""
    is_free_text: bool = False
    """Whether clients get the text of its only argument in the place of arguments."""

    def stated(self) -> JsonObject:
        """The tool in the form that templates take."""
        function: dict[str, object] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model has made in an earlier turn."""

    id: str
    name: str
    arguments: JsonObject
    chars: int = 0
    """Approximate length of the call as JSON, in characters."""

    def stated(self, *, in_text: bool = False) -> JsonObject:
        """The call in the form that templates take: arguments are an object, unless ``in_text``."""
        text = json.dumps(self.arguments, ensure_ascii=False) if in_text else ""
        function = {"name": self.name, "arguments": text or self.arguments}
        return {"id": self.id, "type": "function", "function": function}
