"""Which tools an answer may or must call."""

from dataclasses import dataclass

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
    def names(self) -> frozenset[str]:
        """Of what may be called."""
        return frozenset({self.only} if self.only else (tool.name for tool in self.tools))
