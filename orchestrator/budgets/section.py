"""The room's settings."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from orchestrator.settings.rooms import RoomSection
from worker.environment import Section

if TYPE_CHECKING:
    from orchestrator.settings import Settings


class Price(Section):
    """Prices per million tokens, in the operator's currency."""

    prompt: float = Field(default=0.0, ge=0)
    cached: float | None = Field(default=None, ge=0)
    """Price of cached prompt tokens. Unset: the price of other prompt tokens."""
    completion: float = Field(default=0.0, ge=0)


class KeyBudget(Section):
    """A key's budget for a calendar month (UTC); 0 means no limit."""

    tokens: int = Field(default=0, ge=0)
    """Most prompt and answer tokens together."""
    cost: float = Field(default=0.0, ge=0)
    """Highest cost, computed from ``budgets.prices``."""


class BudgetSection(RoomSection):
    """Monthly budgets of keys, and prices of tokens (DL-25)."""

    table: ClassVar = "budgets"

    each_key: KeyBudget = KeyBudget()
    """Default budget of each key, and the budget of requests without a key."""
    keys: dict[str, KeyBudget] = Field(default_factory=dict)
    """Budgets of individual keys, by key name."""
    prices: dict[str, Price] = Field(default_factory=dict)
    """Prices by model name. A model without a price costs nothing."""

    def check(self, settings: "Settings") -> None:
        if unknown := sorted(set(self.keys) - set(settings.keys)):
            raise ValueError(f"budgets.keys names {unknown[0]!r}, which is not among keys")
