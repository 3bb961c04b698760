"""The proxy on this process's stdin and stdout."""

import logging
import os
import signal
import sys
from typing import NoReturn

import anyio
from mcp.client import stdio
from mcp.server.stdio import stdio_server

from tidegate.proxy.limits import CallLimits
from tidegate.proxy.relay import Connect, NoServer, Relay

FAILED = 1
INTERRUPTED = 130


def run(connect: Connect, limits: CallLimits) -> int:
    """Relay until the client closes stdin, or until SIGINT or SIGTERM; returns the exit status, or
    ends the process where stdin is still open. Nothing of the server is left either way."""
    logging.basicConfig(format="tidegate mcp: %(message)s")
    # What a server prints beside its messages is told in one line, not with a traceback as well.
    logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
    # By the protocol's habit what started the proxy kills it 2 s after it closed stdin: the server
    # must have ended by then, since it is in a group of processes of its own.
    stdio.PROCESS_TERMINATION_TIMEOUT = 1.0
    stdio.FORCE_KILL_TIMEOUT = 0.5
    try:
        return anyio.run(_run, connect, limits)
    except BaseExceptionGroup as errors:
        if errors.split((BrokenPipeError, anyio.BrokenResourceError))[1] is not None:
            raise
        return FAILED  # the client is gone


async def _run(connect: Connect, limits: CallLimits) -> int:
    async with stdio_server() as (source, sink), sink:
        heard: list[int] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_hear_signals, heard, tasks.cancel_scope)
            try:
                await Relay(connect, limits).run(source, sink)
            except NoServer as error:
                print(f"tidegate mcp: the server cannot be started: {error}", file=sys.stderr)
                _leave(FAILED)
            tasks.cancel_scope.cancel()
        if heard:
            _leave(INTERRUPTED if heard[0] == signal.SIGINT else 0)
    return 0


async def _hear_signals(heard: list[int], scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            heard.append(number)
            scope.cancel()


def _leave(status: int) -> NoReturn:
    """End the process although a thread is reading stdin, which nothing can interrupt."""
    sys.stderr.flush()
    os._exit(status)
