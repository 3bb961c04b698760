"""The tools that an answer may or must call."""

from dataclasses import dataclass

from orchestrator.parsing.calls import Schemas
from orchestrator.tasks.tools import Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, of which there is at least one."""

    tools: tuple[Tool, ...]
    must_call: bool = False
    only: str = ""
    """Name of the tool that must be called; empty: any of them."""
    only_one_call: bool = False

    @property
    def schemas(self) -> Schemas:
        """Schemas of the arguments of the tools that may be called, by name."""
        return {tool.name: tool.parameters for tool in self.callable}

    @property
    def forced(self) -> str:
        """Name of the only tool that a call can mean; empty where no call must be made, or several
        tools are possible."""
        names = self.schemas
        return next(iter(names)) if self.must_call and len(names) == 1 else ""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if not self.only or tool.name == self.only)
