"""Which tools an answer may or must call."""

from dataclasses import dataclass

from orchestrator.parsing.calls import Schemas
from orchestrator.tasks.tools import Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One request's. Without any tool there is none of these."""

    tools: tuple[Tool, ...]
    must_call: bool = False
    only: str = ""
    """The one that must be called; empty: any of them."""
    only_one_call: bool = False

    @property
    def schemas(self) -> Schemas:
        """Of the arguments of what may be called, by name."""
        return {tool.name: tool.parameters for tool in self.callable}

    @property
    def forced(self) -> str:
        """The name of the one that can only be meant by a call; empty where none need be made, or
        there are several."""
        names = self.schemas
        return next(iter(names)) if self.must_call and len(names) == 1 else ""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """What may be called."""
        return tuple(tool for tool in self.tools if not self.only or tool.name == self.only)
