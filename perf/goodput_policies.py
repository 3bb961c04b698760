"""The policies that ``perf.goodput`` compares: settings of one and the same orchestrator."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Policy:
    """``settings`` are ``TIDEGATE_…``; all have an unbounded queue beside them."""

    name: str
    label: str
    states_deadline: bool
    settings: Mapping[str, str] = field(default_factory=dict)

    def env(self) -> dict[str, str]:
        values = {"QUEUE_SIZE": "-1", "LOG_LEVEL": "warning"} | dict(self.settings)
        return {f"TIDEGATE_{name}": value for name, value in values.items()}


OURS = Policy("ours", "Tidegate", True)
FIFO = Policy("fifo", "FIFO, no deadlines", False, {"QUEUE_ORDER": "fifo", "ADMISSION": "off"})

FIFO_TIMEOUT = Policy(
    "fifo-timeout",
    "FIFO, queue timeouts",
    True,
    {"QUEUE_ORDER": "fifo", "ADMISSION": "off", "DEADLINE_SCOPE": "queue"},
)
UNPREDICTED = Policy(
    "no-prediction",
    "Tidegate without prediction",
    True,
    {"QUEUE_ORDER": "deadline", "ADMISSION": "off"},
)

POLICIES = (OURS, FIFO, FIFO_TIMEOUT, UNPREDICTED)
