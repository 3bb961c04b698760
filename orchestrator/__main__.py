"""``python -m orchestrator``: serves until told to stop, then leaves no work behind (OR-14)."""

import gc
import os
import signal

if __name__ == "__main__":
    # Until the freeze below, garbage collection finds only live objects. It would take a tenth of
    # the start, and half of the time to load a large journal.
    gc.disable()
    # SIGHUP is blocked until a reload is possible (``handle_signals``): it must not end the
    # process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    # Until the service is up, Ctrl-C exits at once: an interrupted import fails in confusing ways.
    # The launcher may have blocked the signal until here (tidegate/cli/runtime.py).
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

import argparse
import asyncio
import ctypes
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

from aiohttp import web

from catalog.operator_key import keep_key, key_file
from catalog.paths import state_dir
from orchestrator.api.health_port.publisher import HealthPort
from orchestrator.api.http.accepting import RESERVED_FILES, Port, PortSite, most_connections
from orchestrator.api.http.context import AUTH
from orchestrator.api.operator.admin import Control
from orchestrator.api.server import build_runner
from orchestrator.api.starting import PROBES, saying_that_it_starts
from orchestrator.build import KEY_SETTINGS, Components, build, keys_digest, keys_of
from orchestrator.clock import LoopClock, process_age_s
from orchestrator.errors import InvalidRequest
from orchestrator.reload import Reloader
from orchestrator.settings import InvalidSettings, Settings, load_settings
from orchestrator.settings.rooms import modules_of_rooms
from orchestrator.settings.sections import INTERRUPT_GRACE_S
from orchestrator.sharing import Sharing, make_sharing
from orchestrator.tasks.journal.file import JournalError, JournalFile, open_journal
from orchestrator.telemetry import log
from orchestrator.telemetry.log import fields, service_log
from worker.environment import guide_to

CLOSE_CONNECTIONS_S = 0.5
_M_MMAP_THRESHOLD = -3  # malloc.h
MAIN_PORT_ONLY = (
    "health checks are answered only on the main port: set TIDEGATE_HEALTH__PORT to a free port,"
    " or to -1 for none"
)
"""Log message if the default health port is taken."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator",
        description="Serve generation on Triton instances. Options override TIDEGATE_… variables "
        f"and tidegate.toml; {guide_to(Settings)} has all of them.",
    )
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", help="port to listen on (default 8080, 0: any free one)")
    parser.add_argument("--instances", help="gRPC endpoints of Triton: host:port,host:port")
    parser.add_argument(
        "--cors-origins", help="web pages that may use the service: https://ui.example,… or *"
    )
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    try:
        settings = load_settings(**given)
    except InvalidSettings as error:
        print(f"Invalid settings:\n{error}", file=sys.stderr)
        return 2
    log.configure(settings.telemetry.log_format, settings.telemetry.log_level)
    return_large_blocks()
    for name in ("sharing", "extension"):  # imported here, since imports would block the loop
        modules_of_rooms(name)
    return asyncio.run(serve(settings, partial(load_settings, **given)))


async def serve(settings: Settings, load: Callable[[], Settings] = load_settings) -> int:
    """Serve until SIGTERM or SIGINT; a second signal ends the grace period at once. SIGHUP reloads
    the settings with ``load``. Returns the exit status."""
    loop = asyncio.get_running_loop()
    as_read, had_terminal = settings, os.isatty(0)
    most = most_connections()
    if most < settings.http.max_connections:
        service_log.warning(
            "fewer connections than configured: the limit on open files is too low; raise it to %d "
            "(ulimit -n) or lower TIDEGATE_HTTP__MAX_CONNECTIONS",
            settings.http.max_connections + RESERVED_FILES,
            extra=fields(max_connections=most, wanted=settings.http.max_connections),
        )
        http = settings.http.model_copy(update={"max_connections": most})
        settings = settings.model_copy(update={"http": http})
    # This generator makes task ids. An id is enough to read the task's text, so ids must not be
    # guessable.
    rng, clock = random.SystemRandom(), LoopClock(loop)
    sharing = make_sharing(settings, rng, clock.unix)
    where = settings.host, settings.port
    async with AsyncExitStack() as opened:
        try:
            port = await opened.enter_async_context(saying_that_it_starts(*where))
            where = settings.host, settings.health.port
            health_port = _health_port(settings)
        except OSError as error:
            return _cannot_listen(*where, error)
        if health_port is not None:  # closed last: until then it answers "draining"
            opened.push_async_callback(health_port.close)
            health_port.start()
        try:
            file = await open_the_journal(settings, sharing)
        except JournalError as error:
            service_log.error("cannot open the journal: %s", error)
            return 2
        parts = build(settings, clock, rng, file=file, sharing=sharing)
        parts.reloader.settings, parts.reloader.load = as_read, load
        requests = handle_signals(loop, parts.reloader, had_terminal)
        await parts.lifecycle.recover()
        return await _serve_until_told(settings, parts, port, health_port, sharing, requests)


async def _serve_until_told(
    settings: Settings,
    parts: Components,
    port: Port,
    health_port: HealthPort | None,
    sharing: Sharing,
    requests: asyncio.Queue[float],
) -> int:
    """Serve ``port`` until ``requests`` has a stop request, then drain. Returns the exit status."""
    orchestrator, lifecycle = parts.orchestrator, parts.lifecycle
    runner = build_runner(
        orchestrator,
        parts.health,
        parts.discovery,
        parts.api,
        Control(lifecycle, parts.reloader, keys_of),
        shutdown_timeout_s=CLOSE_CONNECTIONS_S,
    )
    await runner.setup()
    number = port.sockets[0].getsockname()[1]
    operators = key_file(state_dir(), settings.host, number)
    _let_operate(runner.app, operators)
    parts.reloader.follow(KEY_SETTINGS, lambda _: _let_operate(runner.app, operators))
    await PortSite(runner, port).start()
    lifecycle.start()
    lifecycle.join(runner.addresses[0][1], keys_digest(settings))
    # Objects that are alive now stay alive, so the collector can skip them.
    gc.freeze()
    gc.enable()
    lifecycle.server_start_ms = 1000 * process_age_s()
    for address in runner.addresses:
        service_log.info("listening", extra=fields(host=address[0], port=address[1]))
    if health_port is not None:
        health_port.answers = parts.health.by_path
        where = fields(host=settings.host, port=health_port.port)
        service_log.info("listening for health checks", extra=where)
    grace_s = await requests.get()
    service_log.info("stopping", extra=fields(live_tasks=orchestrator.live_tasks, grace_s=grace_s))
    second = asyncio.create_task(requests.get())
    draining = asyncio.create_task(lifecycle.drain(grace_s))
    await asyncio.wait([second, draining], return_when=asyncio.FIRST_COMPLETED)
    second.cancel()
    if not draining.done():
        draining.cancel()
        await lifecycle.drain(0.0)
    await lifecycle.close()
    with suppress(OSError):  # while no other process can listen there
        operators.unlink(missing_ok=True)
    await runner.cleanup()
    service_log.info("stopped")
    return 0


def _health_port(settings: Settings) -> HealthPort | None:
    """The bound health port, if any. Raises ``OSError`` if a requested port is not available."""
    port = settings.health.port
    is_asked_for = "port" in settings.health.model_fields_set
    if port < 0 or (port == settings.port and not is_asked_for):
        return None
    try:
        return HealthPort(lambda: PROBES, settings.host, port)
    except OSError as error:
        if is_asked_for:
            raise
        service_log.info(MAIN_PORT_ONLY, extra=fields(port=port, reason=error.strerror))
        return None


def return_large_blocks() -> None:
    """Make malloc map blocks of 1 MiB and more (large bodies and prompts) individually, so that a
    free unmaps them. By default glibc adapts after the first one and serves blocks up to 32 MiB
    from heaps, which keep them. No effect without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**20)


async def open_the_journal(settings: Settings, sharing: Sharing) -> JournalFile | None:
    """Open the file of durable tasks; None without a journal. Raises ``JournalError`` if a journal
    setting is explicit, or if the file has tasks that would be left behind."""
    config = settings.journal.config
    if config is None:
        return None
    try:
        file = await asyncio.to_thread(open_journal, config)
    except JournalError as error:
        if settings.journal.model_fields_set:
            raise
        service_log.warning("continuing without a journal; durable tasks are refused: %s", error)
        return None
    if sharing.is_shared and file.unfinished:
        file.close()
        raise JournalError(
            f"{config.path} has {len(file.unfinished)} durable tasks that have not ended, and "
            "durable tasks are now in the shared store: first start without "
            "TIDEGATE_STATE__URL until they end, or set another TIDEGATE_JOURNAL__PATH"
        )
    return file


def _let_operate(app: web.Application, path: Path) -> None:
    """Require the key at ``path`` for operators' calls, unless the settings have an admin key."""
    if app[AUTH].has_admin:
        with suppress(OSError):  # unused, or left by a process that was killed
            path.unlink(missing_ok=True)
        return
    try:
        app[AUTH].let_operate(keep_key(path))
    except OSError as error:
        service_log.warning(
            "cannot write the operators' key, so nobody can operate this service: make the folder "
            "writable for only this user (TIDEGATE_HOME), or set TIDEGATE_ADMIN_TOKEN",
            extra=fields(path=str(path), error=error.strerror or str(error)),
        )


def _cannot_listen(host: str, port: int, error: OSError) -> int:
    service_log.error("choose another port: cannot listen on %s:%d: %s", host, port, error.strerror)
    return 1


def handle_signals(
    loop: asyncio.AbstractEventLoop, reloader: Reloader, had_terminal: bool
) -> asyncio.Queue[float]:
    """Handle SIGHUP: it reloads the settings, or stops the service as Ctrl-C does if the terminal
    of the process was closed. Returns a queue that gets an entry for each other signal: the grace
    period for running tasks, in seconds."""
    requests: asyncio.Queue[float] = asyncio.Queue()
    reloads: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        with suppress(InvalidRequest):  # the log says why
            await reloader.reload()

    def hang_up() -> None:
        if had_terminal and not os.isatty(0):
            requests.put_nowait(INTERRUPT_GRACE_S)
            return
        task = asyncio.create_task(reload(), name="reload")
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(
        signal.SIGTERM, lambda: requests.put_nowait(reloader.settings.shutdown.grace_s)
    )
    loop.add_signal_handler(signal.SIGINT, requests.put_nowait, INTERRUPT_GRACE_S)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    return requests


if __name__ == "__main__":
    sys.exit(main())
