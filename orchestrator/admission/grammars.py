"""Refuses unusable grammars: it tests each with the library that workers use.

The latest results are cached: clients send the same schema again and again.
"""

import asyncio
import signal
import sys
from collections import OrderedDict
from importlib.util import find_spec

import msgspec

from orchestrator.admission.grammar_compiler import GrammarFinding
from orchestrator.admission.rate_limits import Rate
from orchestrator.errors import InvalidRequest, RateLimited, TidegateError
from orchestrator.fair_share import FairGate
from orchestrator.helper_process import start_helper
from orchestrator.telemetry.log import fields, service_log
from protocol import Grammar, ModelCard

_HAS_LIBRARY = find_spec("llguidance") is not None
"""Whether grammars can be checked here. The checking process loads the library. Without the
library, workers check grammars."""
_COMPILER = "orchestrator.admission.grammar_compiler"
_TOO_LONG = "the grammar cannot be used: it takes too long to compile; combine fewer patterns"
_GAVE_UP = (-signal.SIGPROF, -signal.SIGABRT)
"""Exit statuses of a process that ended because a grammar took too much time or memory."""
MS_PER_MIN = 30_000
"""Ms of the process per minute that one tenant may use: half of a minute, so that no tenant keeps a
core busy."""
_NOTHING = GrammarFinding()
_finding_decoder = msgspec.msgpack.Decoder(GrammarFinding)
_KEPT_BYTES = 4 * 2**20
"""Maximum memory of the cached results: about sixteen of the largest usable grammars (250 KB)."""


class GrammarCheck:
    """Checks the grammars of one event loop. New ones are tested one at a time in a process that
    can be killed; tenants share its time equally."""

    def __init__(self) -> None:
        self._found: OrderedDict[Grammar, GrammarFinding] = OrderedDict()
        self._bytes = 0
        self._gate = FairGate()
        self._spent: dict[str, Rate] = {}
        """Recent time of the process by tenant, in ms."""
        self._process: asyncio.subprocess.Process | None = None

    def is_known(self, grammar: Grammar) -> bool:
        """Whether ``require`` knows if the grammar is usable."""
        return not _HAS_LIBRARY or grammar in self._found

    def require(self, grammar: Grammar, card: ModelCard, ignores_eos: bool) -> None:
        """Raise ``InvalidRequest`` if the grammar is known to be unusable with that model."""
        if not card.grammars:
            raise InvalidRequest(
                f"{card.model!r} does not support grammars: its workers have no library for them "
                "(see their logs); leave the grammar out",
                field="grammar",
            )
        if ignores_eos:
            raise InvalidRequest(
                "a grammar decides where the text ends: do not combine it with ignore_eos",
                field="ignore_eos",
            )
        found = self._found.get(grammar, _NOTHING)
        if found.problem:
            self._found.move_to_end(grammar)
            raise InvalidRequest(found.problem, field="grammar")

    def passed_over(self, grammar: Grammar) -> tuple[str, ...]:
        """The known keywords of a grammar's schema that cannot be enforced."""
        return self._found.get(grammar, _NOTHING).passed_over

    async def find(self, grammar: Grammar, tenant: str) -> None:
        """Test an unknown grammar. Raises ``RateLimited`` if the tenant's time is used up."""
        now = asyncio.get_running_loop().time
        self._require_time(tenant, now())
        await self._gate.enter(tenant)
        began = now()
        try:
            if not self.is_known(grammar):
                self._require_time(tenant, began)
                self._keep(grammar, await self._try_out(grammar))
        finally:
            ended = now()
            self._charge(tenant, ended - began, ended)
            self._gate.leave(tenant, ended - began)

    def _require_time(self, tenant: str, now: float) -> None:
        spent = self._spent.get(tenant)
        wait_s = 0.0 if spent is None else spent.wait_s(1, now)
        if wait_s:
            raise RateLimited(
                f"new grammars of this tenant have taken {MS_PER_MIN / 1000:g} s to check within "
                "a minute, which is its share; reuse earlier grammars, or try again later",
                retry_after_ms=1000 * wait_s,
                field="grammar",
            )

    def _charge(self, tenant: str, took_s: float, now: float) -> None:
        self._spent = {t: rate for t, rate in self._spent.items() if rate.reset_s(now)}
        self._spent.setdefault(tenant, Rate(MS_PER_MIN)).take(round(1000 * took_s), now)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _try_out(self, grammar: Grammar, *, is_again: bool = False) -> GrammarFinding:
        try:
            if self._process is None or self._process.returncode is not None:
                self._process = await start_helper(_COMPILER)
        except OSError as error:
            service_log.warning(
                "cannot start the grammar check process; workers check grammars",
                extra=fields(reason=error.strerror),
            )
            return _NOTHING
        process, found = self._process, None
        assert process.stdin is not None and process.stdout is not None
        try:
            asked = msgspec.msgpack.encode(grammar)
            process.stdin.write(len(asked).to_bytes(4, "big") + asked)
            size = int.from_bytes(await process.stdout.readexactly(4), "big")
            found = _finding_decoder.decode(await process.stdout.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            if await process.wait() in _GAVE_UP:
                return GrammarFinding(_TOO_LONG)
            if is_again:  # something else ended both, such as a lack of memory
                raise TidegateError("the grammar could not be checked; try again") from None
        finally:
            if found is None:  # its late answer would be read as the next one's
                self._process = None
                if process.returncode is None:
                    process.kill()
        return found or await self._try_out(grammar, is_again=True)

    def _keep(self, grammar: Grammar, found: GrammarFinding) -> None:
        if found.passed_over:
            # Names of formats are client text, which is not logged.
            names = sorted({name.partition("=")[0] for name in found.passed_over})
            service_log.info(
                "some keywords of a schema cannot be enforced and are ignored",
                extra=fields(keywords=" ".join(names)),
            )
        self._found[grammar] = found
        self._bytes += _bytes_of(grammar, found)
        while self._bytes > _KEPT_BYTES:
            self._bytes -= _bytes_of(*self._found.popitem(last=False))


def _bytes_of(grammar: Grammar, found: GrammarFinding) -> int:
    texts = grammar.text, grammar.before, found.problem, *found.passed_over
    return sum(map(sys.getsizeof, (grammar, found, found.passed_over, *texts)))
