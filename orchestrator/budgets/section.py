"""The room's settings."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from orchestrator.settings.rooms import RoomSection
from worker.environment import Section

if TYPE_CHECKING:
    from orchestrator.settings import Settings


class Price(Section):
    """What a million tokens cost, in the operator's currency."""

    prompt: float = Field(default=0.0, ge=0)
    cached: float | None = Field(default=None, ge=0)
    """Prompt tokens that were in a cache; unset: as the others."""
    completion: float = Field(default=0.0, ge=0)


class KeyBudget(Section):
    """What a key may spend in a calendar month (UTC); 0 is no limit."""

    tokens: int = Field(default=0, ge=0)
    """Tokens of prompts and answers together."""
    cost: float = Field(default=0.0, ge=0)
    """Money, by ``budgets.prices``."""


class BudgetSection(RoomSection):
    """Budgets of keys by the month, and what tokens cost (DL-25)."""

    table: ClassVar = "budgets"

    each_key: KeyBudget = KeyBudget()
    """Budget of each key, and of requests without a key."""
    keys: dict[str, KeyBudget] = Field(default_factory=dict)
    """Budgets of single keys, by their names."""
    prices: dict[str, Price] = Field(default_factory=dict)
    """Prices by the name of a model. A model without one costs nothing."""

    def check(self, settings: "Settings") -> None:
        if unknown := sorted(set(self.keys) - set(settings.keys)):
            raise ValueError(f"budgets.keys names {unknown[0]!r}, which is not among keys")
