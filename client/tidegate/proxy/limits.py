"""How long a call may take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidegate.tools import stated_timeout_s

CALL = "tools/call"


class TimeLimit(NamedTuple):
    """Seconds that a call may take, and whose word that is, for the error of one that took
    longer."""

    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Time limits in seconds: ``by_tool`` for single tools, ``default_s`` for calls of the others
    that state none themselves (None: none)."""

    default_s: float | None = None
    by_tool: Mapping[str, float] = field(default_factory=dict)

    def of(self, method: str, params: Mapping[str, Any]) -> TimeLimit | None:
        """Limit of a request; None where it has none. Raises ``ValueError`` where it states
        something that is no time."""
        limits = []
        stated_s = stated_timeout_s(params.get("_meta"))
        if stated_s is not None:
            limits.append(TimeLimit(stated_s, "no more was left of the run's time"))
        if method == CALL:
            own_s = self.by_tool.get(str(params.get("name")))
            if own_s is not None:
                limits.append(TimeLimit(own_s, "the limit of this tool (tidegate mcp --tool)"))
            elif self.default_s is not None and not limits:
                limits.append(TimeLimit(self.default_s, "the limit by tidegate mcp --timeout"))
        return min(limits, default=None)
