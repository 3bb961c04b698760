"""Optional rooms of an orchestrator under test."""

from typing import TypeVar

from orchestrator.extension import Extension
from orchestrator.service import Orchestrator

E = TypeVar("E", bound=Extension)


def room(orchestrator: Orchestrator, kind: type[E]) -> E:
    """The room of that kind."""
    return next(each for each in orchestrator.rooms if isinstance(each, kind))
