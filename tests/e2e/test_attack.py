"""The attacks of ``make attack``, bounded: whatever comes, the books balance afterwards."""

import asyncio
import random

import pytest

from perf.attack.__main__ import ATTACKS
from perf.attack.books import Books
from perf.attack.target import Budget, Tally, Target
from tests.e2e.conftest import Stack

pytestmark = pytest.mark.e2e

TRIES = {"prompts": 2, "connections": 2, "clients": 40, "lanes": 40}
SECONDS = 8.0


@pytest.mark.parametrize("name", ATTACKS)
def test_the_books_balance_after(name: str, demo: Stack) -> None:
    """No undocumented error, no secret in any answer or log, nothing left running, nothing lost."""
    target = Target(
        "127.0.0.1",
        demo.orchestrator.port,
        demo.triton.instance.ports.http,
        demo.triton.grpc,
        "demo",
        {"orchestrator": demo.orchestrator.pid, "worker": demo.triton.stub_pid},
        (demo.orchestrator.log, demo.triton.log),
    )
    tally = Tally()

    async def attack() -> None:
        books = Books(target)
        await ATTACKS[name](target, random.Random(1), tally, Budget(TRIES.get(name, 300), SECONDS))
        # Sizes are of a machine and a first time; ``make attack`` looks at those.
        await books.close(tally, sizes=False)

    asyncio.run(attack())
    assert tally.tries
    assert not tally.faults
