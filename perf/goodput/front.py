"""Orchestrators with different policies, and the requests sent through them."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from perf.goodput.policies import Policy
from perf.load.connection import HOST
from perf.load.open_loop import OpenLoopPlan, Result, StreamRequest
from perf.stack.offer import offer
from perf.stack.stack import orchestrating
from pool.units.orchestrator import OrchestratorProcess


@dataclass(frozen=True, slots=True)
class Front:
    """An orchestrator that runs one policy."""

    policy: Policy
    service: OrchestratorProcess

    async def offer(self, path: str, asks: list[StreamRequest], linger_s: float) -> list[Result]:
        """Send ``asks`` and wait until they end. Raises ``RuntimeError`` if work continues after
        its clients have left."""
        states, hangs_up = self.policy.states_deadline, self.policy.hangs_up
        plan = OpenLoopPlan(HOST, self.service.port, path, asks, states, linger_s, hangs_up)
        return await offer(plan, self.policy.label)


@asynccontextmanager
async def fronts(
    policies: Iterable[tuple[Policy, Sequence[str]]],
) -> AsyncIterator[dict[str, Front]]:
    """Run one orchestrator per policy in front of its instances; yields them by the policy's
    name."""
    async with AsyncExitStack() as stack:
        found = {}
        for policy, instances in policies:
            service = orchestrating(instances, policy.env(), f"goodput-{policy.name}")
            found[policy.name] = Front(policy, await stack.enter_async_context(service))
        yield found
