"""The policies that ``perf.goodput`` compares, as settings of the same orchestrator.

Rivals from papers (JITServe, QoServe, SLOs-Serve) decide in each step which jobs an engine runs, so
only the simulator has them: ``perf.sim.rivals``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy; ``settings`` are ``TIDEGATE_…``. In addition, every queue is unbounded."""

    name: str
    label: str
    states_deadline: bool
    settings: Mapping[str, str] = field(default_factory=dict)
    hangs_up: bool = False
    """Whether clients close their connections at their deadlines."""
    knows_lengths: bool = False
    """Whether requests state their true answer lengths: an upper bound, as no client knows them."""

    def env(self) -> dict[str, str]:
        values = {"QUEUE__MAX_WAITING": "-1", "TELEMETRY__LOG_LEVEL": "warning"} | dict(
            self.settings
        )
        return {f"TIDEGATE_{name}": value for name, value in values.items()}


FIXED_ROWS: Mapping[str, str] = {"DISPATCH__ROW_POLICY": "fixed"}
"""Settings to always run as many rows as an instance has slots, even if that hurts deadlines."""

_FIFO = {"QUEUE__ORDER": "fifo", "ADMISSION__MODE": "off"}

OURS = Policy("ours", "Tidegate", True)
KNOWN = Policy("known", "Tidegate, lengths known", True, knows_lengths=True)
UNPREDICTED = Policy(
    "no-prediction",
    "Earliest deadline first",
    True,
    {"QUEUE__ORDER": "deadline", "ADMISSION__MODE": "off"},
)
"""Earliest deadline with expiry, as llm-d and Dynamo queue; also Tidegate without its forecasts."""
HANG_UP = Policy("fifo-hang-up", "FIFO, clients hang up", False, _FIFO, hangs_up=True)
"""First come, first served with clients that hang up, as with vLLM."""
FIFO = Policy("fifo", "FIFO, no deadlines", False, _FIFO)

POLICIES = (OURS, FIFO, UNPREDICTED)
"""Policies that the simulator can run with the real orchestrator; clients there never hang up."""
COMPARED = (OURS, KNOWN, UNPREDICTED, HANG_UP)
"""Policies that ``perf.goodput`` runs by default; ``EVERY`` has all by name."""
EVERY = (*COMPARED, FIFO)
