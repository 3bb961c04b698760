"""The attacks of ``make attack``, bounded: counters and resources add up whatever comes."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from perf.attack.__main__ import ATTACKS
from perf.attack.checks import StateChecks
from perf.attack.target import Budget, Tally, Target
from tests.e2e.conftest import Stack, stack_of
from tests.support.stack import Triton

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRIES = {"prompts": 2, "large-bodies": 1, "connections": 2, "clients": 24, "lanes": 24}
SECONDS = 8.0
TOKEN = "a-lane-token-of-this-test"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Stack]:
    """As ``tidegate up`` starts them: lanes want a token."""
    yield from stack_of(Triton(lane_token=TOKEN), lanes__token=TOKEN)


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_counted_adds_up_after(name: str, guarded: Stack) -> None:
    """No undocumented error, no secret in any answer or log, nothing left running, nothing lost."""
    target = Target(
        "127.0.0.1",
        guarded.orchestrator.port,
        guarded.triton.instance.ports.http,
        guarded.triton.grpc,
        "demo",
        {"orchestrator": guarded.orchestrator.pid, "worker": guarded.triton.stub_pid},
        (guarded.orchestrator.log, guarded.triton.log),
    )
    tally = Tally()

    async def attack() -> None:
        checks = StateChecks(target)
        await ATTACKS[name](target, random.Random(1), tally, Budget(TRIES.get(name, 80), SECONDS))
        # Sizes are of a machine and a first time; ``make attack`` looks at those.
        await checks.close(tally, sizes=False)

    asyncio.run(attack())
    assert tally.tries
    assert not tally.faults
