"""Drains: what runs ends, and what comes is told to go elsewhere. Measured last, as the server may
be gone afterwards."""

import asyncio
import math
from asyncio.subprocess import DEVNULL, Process
from contextlib import suppress
from typing import Final

from .rules import Finding, inapplicable, judged, unmeasured
from .server import Answer, Gone, Server, hang_up, together

_STREAMS: Final = 4
_LASTS_S: Final = 2.0
"""Seconds that the streams which run when the drain begins take at least, where the server's
longest answers are so long."""
_BEGINS_S: Final = 0.5
"""Seconds that a command which waits for the drain's end has to begin it."""
_RULES: Final = ("drain.running", "drain.refuses")


async def check(server: Server) -> list[Finding]:
    """Begin streams, drain, and ask for more."""
    patience_s = server.patience_s
    if not server.target.drain:
        return inapplicable("no command was given that drains the server (--drain)", *_RULES)
    tokens = min(server.longest, max(server.short, round(_LASTS_S / server.gap_s)))
    streams = range(min(_STREAMS, server.streams))
    running = [server.begin(tokens, 2 * patience_s) for _ in streams]
    try:
        for each in running:
            await each.started.wait()
        is_running = any(math.isinf(each.end_s) for each in running)
        process = await _begun(server.target.drain)
        if isinstance(process, str):
            return [unmeasured(rule, process) for rule in _RULES]
        try:
            return await _during(server, running, is_running)
        finally:
            await _ended(process, patience_s)
    finally:
        await hang_up(running)


async def _begun(command: tuple[str, ...]) -> Process | str:
    """The command, which has begun the drain, or in words why it has not."""
    run = asyncio.create_subprocess_exec
    try:
        process = await run(*command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
    except OSError as error:
        return f"the command that drains cannot be run: {error}"
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _BEGINS_S)
    if process.returncode:
        return f"the command that drains ended with status {process.returncode}"
    return process


async def _ended(process: Process, limit_s: float) -> None:
    try:
        await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _during(server: Server, running: list[Answer], is_running: bool) -> list[Finding]:
    late: Answer | None = None
    with suppress(Gone):
        late = await server.one()
    before = await together(running)
    broken = [answer for answer in before if not answer.is_whole]
    said = f"{len(before) - len(broken)} of {len(before)} streams ended whole"
    said += f": {broken[0].outcome()}" if broken else ""
    ran = judged("drain.running", not broken, said)
    if not is_running:
        ran = unmeasured("drain.running", "the streams had ended before the drain began")
    is_told = late is None or late.is_refused or late.is_whole
    seen = "connection refused" if late is None else late.outcome()
    return [ran, judged("drain.refuses", is_told, seen)]
