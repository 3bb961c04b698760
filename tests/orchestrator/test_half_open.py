"""Peers that vanish without a word, and wall clocks that jump."""

import asyncio
import socket
import time

import pytest

from orchestrator.api.http.connection import VANISHED_S, Connection
from tests.orchestrator.conftest import Service
from tests.orchestrator.dispatch.test_moving import begin_text
from tests.orchestrator.dispatch.test_retry import EXPECTED, TASK, speak, text_of
from tests.support.fake_worker import FakeWorker, Plan


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
async def test_wp1_the_kernel_gives_up_a_client_that_vanished(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing on one machine can vanish without a reset: what is looked at is what was asked."""
    made: list[Connection] = []
    told = Connection.connection_made

    def keep(connection: Connection, transport: asyncio.BaseTransport) -> None:
        told(connection, transport)
        made.append(connection)

    monkeypatch.setattr(Connection, "connection_made", keep)
    await service.ask("POST", "/v2/tasks", 202, json=TASK)
    own = made[0].transport.get_extra_info("socket")  # type: ignore[union-attr]
    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * VANISHED_S
    assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < VANISHED_S


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_dl2_a_wall_clock_that_jumps_moves_no_deadline(
    worker: FakeWorker, service: Service, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    running = await begin_text(service, worker)
    held = worker.plan(worker.submits[0])
    (instance,) = service.orchestrator.registry
    monkeypatch.setattr(service.orchestrator.clock, "unix", lambda: time.time() + jump_s)
    service.orchestrator.stages.store.prune()
    service.parts.monitor.check_heartbeats()
    assert instance.ready
    worker.plan = lambda submit: Plan(speak=speak)
    assert text_of(await service.run(TASK | {"deadline_ms": 30_000})) == EXPECTED
    assert 0 < worker.submits[-1].budget_ms <= 30_000
    held.release.set()
    assert text_of(await running) == EXPECTED
    assert service.outcomes() == ["met", "met"]
