"""Drains: what runs ends, and what comes is told to go elsewhere.

Measured last, as the server may be gone afterwards.
"""

import asyncio
from contextlib import suppress
from typing import Final

from .pace import Trial
from .rules import Finding, Verdict
from .wire import Answer, Gone, Running, together

_STREAMS: Final = 4
_LASTS_S: Final = 2.0
"""Seconds that the streams which run when the drain begins take at least, where the server's
longest answers are so long."""
_BEGINS_S: Final = 0.5
"""Seconds that a command which waits for the drain's end has to begin it."""
_RULES: Final = ("drain.running", "drain.refuses")


async def check(trial: Trial) -> list[Finding]:
    """Begin streams, drain, and ask for more."""
    command = trial.target.drain
    if not command:
        said = "no command was given that drains the server (--drain)"
        return [Finding(rule, Verdict.NOT_APPLICABLE, said) for rule in _RULES]
    tokens = min(trial.pace.longest, max(trial.pace.short, round(_LASTS_S / trial.pace.gap_s)))
    count, limit_s = min(_STREAMS, trial.pace.streams), trial.effort.patience_s
    running = [trial.wire.begin(tokens, 2 * limit_s) for _ in range(count)]
    try:
        for run in running:
            await run.answer.started.wait()
        is_running = any(not run.is_done for run in running)
        process = await _begun(command)
        if isinstance(process, str):
            return [Finding(rule, Verdict.UNMEASURED, process) for rule in _RULES]
        try:
            return await _during(trial, running, is_running=is_running)
        finally:
            await _ended(process, limit_s)
    finally:
        for run in running:
            await run.hang_up()


async def _begun(command: tuple[str, ...]) -> asyncio.subprocess.Process | str:
    """The command, which has begun the drain, or in words why it has not."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        return f"the command that drains cannot be run: {error}"
    with suppress(TimeoutError):
        async with asyncio.timeout(_BEGINS_S):
            await process.wait()
    if process.returncode:
        return f"the command that drains ended with status {process.returncode}"
    return process


async def _ended(process: asyncio.subprocess.Process, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _during(trial: Trial, running: list[Running], *, is_running: bool) -> list[Finding]:
    late = await _late(trial)
    before = await together(running)
    whole = sum(answer.is_whole for answer in before)
    said = f"{whole} of {len(before)} streams ended whole"
    if whole < len(before):
        said += f": {next(a for a in before if not a.is_whole).outcome()}"
    ran = Finding("drain.running", Verdict.PASS if whole == len(before) else Verdict.FAIL, said)
    if not is_running:
        said = "the streams had ended before the drain began"
        ran = Finding("drain.running", Verdict.UNMEASURED, said)
    is_told = late is None or late.is_refused or late.is_whole
    seen = "connection refused" if late is None else late.outcome()
    return [ran, Finding("drain.refuses", Verdict.PASS if is_told else Verdict.FAIL, seen)]


async def _late(trial: Trial) -> Answer | None:
    """Answer to a request that comes during the drain; None where nobody takes it."""
    try:
        return await trial.wire.chat(trial.pace.short, trial.effort.patience_s)
    except Gone:
        return None
