"""``tidegate pool``: runs a manager in the foreground, or sends orders to a running one. Each
coroutine here does the work of one command.

Modules that only a manager needs, mainly gRPC and HTTP, are imported when it starts, so that the
other commands are fast.
"""

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path

from catalog.errors import PoolInUse, ProvisionError
from orchestrator.telemetry import log
from orchestrator.telemetry.narration import POOL, narrate
from pool.events import EventKind, PoolEvent, pool_log
from pool.fleet.home import Answer, PoolHome, ask, home_of
from pool.pool_file import PoolFile, read_pool_file
from pool.preflight.nvml import read_gpus
from pool.process.process import FoundRun, GuardedProcess, clear_remains, find_detached

_ASK_S = 10.0
_END_S = 30.0
"""Maximum seconds that ending takes after the drain."""
_BAD = {EventKind.LOST, EventKind.FAILED, EventKind.WARNED}
_BAD |= {EventKind.KEPT, EventKind.REFUSED_FILE, EventKind.UNREGISTERED}


def say(event: PoolEvent) -> None:
    """Log an event: one sentence, and its fields."""
    level = logging.WARNING if event.kind in _BAD else logging.INFO
    narrate(
        pool_log,
        POOL[event.kind.value],
        event.target,
        level,
        detail=event.text or None,
        seconds=round(event.seconds, 3) if event.seconds else None,
    )


async def run(path: Path) -> None:
    """Run a pool until SIGINT or SIGTERM; a second one hastens it."""
    form = os.environ.get("TIDEGATE_TELEMETRY__LOG_FORMAT", "auto")
    level = os.environ.get("TIDEGATE_TELEMETRY__LOG_LEVEL", "info")
    log.configure("json" if form == "json" else "text" if form == "text" else "auto", level)
    from pool.fleet.service import PoolService

    service = PoolService(path, read_gpus, say)
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        service.end(service.file.pool.drain_s if asked == 1 else 0.0)

    def reload() -> None:
        if service.manager is not None:
            with contextlib.suppress(ProvisionError):  # reported by an event
                service.reload()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    await service.run()


async def status(path: Path | None) -> Answer:
    """The state of every instance. Without a manager, which would restart them, its process id is
    None, and ``error`` says why."""
    home = home_of(_file(path))
    try:
        return await ask(home, {"do": "status"}, _ASK_S)
    except PoolInUse as error:
        return _unmanaged(home) | {"error": str(error)}


async def reload(path: Path | None) -> Answer:
    """Make the manager reload its file; the changes that it makes."""
    return await ask(home_of(_file(path)), {"do": "reload"}, _ASK_S)


async def stop(path: Path | None, how: str) -> None:
    """End the pool: ``drain`` it, end it ``now``, or ``leave`` its instances running."""
    file = _file(path)
    home, drain_s = home_of(file), file.pool.drain_s
    try:
        await ask(home, {"do": "stop", "how": how}, drain_s + _END_S)
    except PoolInUse:
        if not find_detached(home) or how == "leave":
            raise
        await _end_unmanaged(home, 0.0 if how == "now" else drain_s)


async def _end_unmanaged(path: Path, grace_s: float) -> None:
    """End instances whose manager is gone. Nothing can drain them without a manager, so their
    guardians end them, first with SIGTERM. Raises ``PoolInUse`` if a manager is starting or hangs,
    because it would restart them."""
    home = PoolHome(path)
    home.claim()
    try:
        await asyncio.gather(*(_end(found, grace_s) for found in find_detached(path)))
        clear_remains(path, [])
    finally:
        home.release()


async def _end(found: FoundRun, grace_s: float) -> None:
    process = await GuardedProcess.adopt(found, None)
    await process.end(grace_s)


def _unmanaged(home: Path) -> Answer:
    """The instances that run without a manager, as an answer."""
    return {
        "manager_pid": None,
        "home": str(home),
        "instances": [
            {
                "name": found.label.unit,
                "state": "unmanaged",
                "reason": "it runs without a pool manager, which would restart it",
                "address": found.label.facts.get("ports", ""),
                "where": "",
                "pid": found.guardian.pid,
                "restarts": 0,
            }
            for found in find_detached(home)
        ],
        "targets_failing": {},
    }


def _file(path: Path | None) -> PoolFile:
    return PoolFile() if path is None else read_pool_file(path)
