"""Clients of every kind. Each knows the exact text that it must get.

A client behaves like a well-written one behind a load balancer: it resends a refused or undelivered
request to the other orchestrator. A durable client stays with the orchestrator whose journal has
its task. If the orchestrators share a state, all clients roam and ask any orchestrator.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from perf.chaos.world import World

PAUSE_S: Final = 0.1
"""Seconds between two rounds of attempts."""
NEVER_THERE: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Errors after which a request reached no server, and may be sent to another."""
_REFUSED: Final = (429, 503)


@dataclass(slots=True)
class Asker:
    """A client that sends ``headers`` with every request. It calls ``refused`` for each refusal
    (try elsewhere or later), and ``heard`` for each part of a streamed text."""

    http: aiohttp.ClientSession
    headers: Mapping[str, str]
    refused: Callable[[], None]
    heard: Callable[[], None] = lambda: None

    def is_refused(self, response: aiohttp.ClientResponse) -> bool:
        """Whether an answer is a refusal (try elsewhere or later); if so, calls ``refused``."""
        if response.status not in _REFUSED:
            return False
        self.refused()
        return True

    async def complete(self, urls: AsyncIterator[str], body: Mapping[str, Any]) -> tuple[str, str]:
        """Outcome and text of a completion, streamed if ``body`` says so. If a server refuses or is
        down, the next of ``urls`` is asked."""
        async for url in urls:
            try:
                async with self.http.post(
                    f"{url}/v1/completions", json=body, headers=self.headers
                ) as response:
                    if self.is_refused(response):
                        continue
                    if response.status != 200:
                        return await _code_of(response), ""
                    if body.get("stream"):
                        return await self._read(response)
                    return "met", (await response.json())["choices"][0]["text"]
            except NEVER_THERE:
                continue
            except (aiohttp.ClientError, TimeoutError):
                return "broken", ""
        raise AssertionError("no server is left to ask")

    async def _read(self, response: aiohttp.ClientResponse) -> tuple[str, str]:
        texts: list[str] = []
        async with aclosing(events_of(response)) as events:
            async for event in events:
                self.heard()
                if event.data == "[DONE]":
                    return "met", "".join(texts)
                said = json.loads(event.data)
                if "error" in said:
                    return str(said["error"].get("code")), ""
                texts += [choice["text"] for choice in said["choices"]]
        return "broken", ""


@dataclass(frozen=True, slots=True)
class SentEvent:
    """A server-sent event; ``id`` is None if it has none."""

    name: str
    id: int | None
    data: str


async def events_of(response: aiohttp.ClientResponse) -> AsyncGenerator[SentEvent, None]:
    """Events of a response as they come."""
    name, number, data = "message", None, ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        key, _, value = line.partition(": ")
        if not line:
            if data:
                yield SentEvent(name, number, data)
            name, number, data = "message", None, ""
        elif key == "event":
            name = value
        elif key == "id":
            number = int(value)
        elif key == "data":
            data = value


async def _code_of(response: aiohttp.ClientResponse) -> str:
    try:
        return str((await response.json())["error"]["code"])
    except (ValueError, KeyError, aiohttp.ClientError):
        return f"http_{response.status}"


KINDS = ("durable", "resumed", "streaming", "plain")
MAX_TOKENS = 48
LONG_TOKENS = 240
"""Length of durable tasks. At a kill, most of them have tokens in the journal, which is written
every 250 ms, and have more tokens to come."""
_FORGETS = 0.5
"""Share of reconnects at which a client has forgotten the last events, or all."""
_FIRST_TOKEN = 2
"""Number of the first token's event."""
_PATIENCE_S = 90.0
_SILENT_S = 10.0
"""Seconds without a byte after which a connection is given up, and its text resumed if it can
be."""
_PROMPTS = ("The old sailor", "Once upon a time", "A small fox", "In the garden")
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.4, "stop": ["\n\n\n"]},
)
BODIES = tuple(
    {"model": "demo", "prompt": prompt, "ignore_eos": True} | sampling
    for prompt in _PROMPTS
    for sampling in _SAMPLINGS
)


@dataclass(slots=True)
class ChaosLedger:
    """Record of the clients' answers. ``faults`` are violations that no fault excuses."""

    round: str = "before"
    outcomes: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)
    """Counts by round, then by kind and outcome; a request is of the round in which it ended."""
    faults: list[str] = field(default_factory=list)
    durable_ids: list[str] = field(default_factory=list)
    memory_prefixes: set[str] = field(default_factory=set)
    """Prefixes of the shared memory's names of every server that ran."""
    refusals: int = 0
    """Number of refusals (try elsewhere or later)."""
    reconnects: int = 0

    def ended(self, kind: str, outcome: str) -> None:
        self.outcomes.setdefault(self.round, Counter())[kind, outcome] += 1

    def fault(self, what: str) -> None:
        self.faults.append(f"{self.round}: {what}")

    def refused(self) -> None:
        self.refusals += 1

    @property
    def offered(self) -> int:
        return sum(counts.total() for counts in self.outcomes.values())


class SteadyClients:
    """Clients that send requests in a loop until they are stopped."""

    def __init__(
        self,
        world: World,
        ledger: ChaosLedger,
        seed: int,
        *,
        pause_s: float = PAUSE_S / 2,
        silent_s: float = _SILENT_S,
        roams: bool = False,
    ) -> None:
        """``roams``: clients reconnect to any orchestrator, because these share a state.
        ``pause_s`` is the mean pause between an answer and the next request. A connection without
        a byte for ``silent_s`` is given up."""
        self.pause_s = pause_s
        self._silent_s = silent_s
        self._roams = roams
        self._world = world
        self._ledger = ledger
        self._seed = seed
        self._texts: dict[int, list[str]] = {}
        """Expected texts by their number of tokens, in the order of ``BODIES``."""
        self._stopping = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []
        self._answers: Counter[asyncio.Task[None] | None] = Counter()
        """Number of answers by client."""
        self._asker: Asker | None = None
        self._number = 0

    async def start(self, per_kind: int) -> None:
        """Learn the expected texts, undisturbed; then start the clients."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=self._silent_s)
        http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        # The body says no deadline where the API has it in a header.
        deadline = {"X-Timeout-Ms": str(int(1000 * _PATIENCE_S))}
        self._asker = Asker(http, deadline, self._ledger.refused)
        for tokens in (MAX_TOKENS, LONG_TOKENS):
            answers = await asyncio.gather(
                *(self._complete(0, body | {"max_tokens": tokens}) for body in BODIES)
            )
            self._texts[tokens] = [text for _, text in answers]
        self._clients = [
            asyncio.create_task(self._ask_on(kind, self._seed * 1000 + i))
            for kind in KINDS
            for i in range(per_kind)
        ]

    async def stop(self) -> None:
        """Stop new requests, and wait until every client has its answer."""
        self._stopping.set()
        await asyncio.gather(*self._clients)
        if self._asker is not None:
            await self._asker.http.close()

    async def all_answered(self) -> None:
        """Wait for one more answer to every client, so that all requests from before have ended."""
        known = self._answers.copy()
        # Each client ends its requests by itself.
        while any(self._answers[one] == known[one] for one in self._clients):  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_S)

    async def _ask_on(self, kind: str, seed: int) -> None:
        rng = random.Random(f"{kind} {seed}")
        tokens = LONG_TOKENS if kind == "durable" else MAX_TOKENS
        while not self._stopping.is_set():
            self._number += 1
            which = rng.randrange(len(BODIES))
            home = rng.randrange(len(self._world.orchestrators))
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    body = BODIES[which] | {"max_tokens": tokens}
                    outcome, text = await self._ask(kind, home, body, rng)
            except TimeoutError:
                outcome, text = "silence", ""
                self._ledger.fault(f"a {kind} request got no answer within {_PATIENCE_S:g} s")
            if outcome == "met" and text != self._texts[tokens][which]:
                self._ledger.fault(f"a {kind} request got another text than undisturbed")
                outcome = "other text"
            if kind == "durable" and outcome != "met":
                self._ledger.fault(f"a durable task came to {outcome}")
            self._ledger.ended(kind, outcome)
            self._answers[asyncio.current_task()] += 1
            await asyncio.sleep(rng.uniform(0.0, 2 * self.pause_s))

    async def _ask(
        self, kind: str, home: int, body: dict[str, Any], rng: random.Random
    ) -> tuple[str, str]:
        match kind:
            case "durable":
                return await self._durable(home, body, f"{self._seed}-{self._number}", rng)
            case "resumed":
                return await self._resumed(home, body, rng)
            case _:
                return await self._complete(home, body | {"stream": kind == "streaming"})

    # ── kinds ────────────────────────────────────────────────────────────────────────────────

    async def _durable(
        self, home: int, body: dict[str, Any], key: str, rng: random.Random
    ) -> tuple[str, str]:
        """A task that a 202 has promised: it must be met, no matter which process dies."""
        order = self._from(home) if self._roams else [home]
        task_id = await self._submit(order, body | {"durable": True}, {"Idempotency-Key": key})
        self._ledger.durable_ids.append(task_id[1])
        return await self._follow(*task_id, [], rng)

    async def _resumed(
        self, home: int, body: dict[str, Any], rng: random.Random
    ) -> tuple[str, str]:
        """A task whose client repeatedly loses the connection, and reconnects."""
        body = body | {"on_disconnect": "continue"}
        task_id = await self._submit(self._from(home), body, {})
        cuts = [rng.randrange(2, MAX_TOKENS) for _ in range(2)]
        return await self._follow(*task_id, cuts, rng)

    async def _complete(self, home: int, body: dict[str, Any]) -> tuple[str, str]:
        assert self._asker is not None
        return await self._asker.complete(self._urls(home), body)

    # ── parts ────────────────────────────────────────────────────────────────────────────────

    def _from(self, home: int) -> list[int]:
        count = len(self._world.orchestrators)
        return [(home + i) % count for i in range(count)]

    async def _tries(self, order: Sequence[int]) -> AsyncIterator[int]:
        while True:
            for at in order:
                yield at
            await asyncio.sleep(PAUSE_S)

    async def _urls(self, home: int) -> AsyncIterator[str]:
        async for at in self._tries(self._from(home)):
            yield self._world.orchestrators[at].url

    async def _submit(
        self, order: Sequence[int], body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, str]:
        asker = self._asker
        assert asker is not None
        async for at in self._tries(order):
            try:
                url = f"{self._world.orchestrators[at].url}/v2/tasks"
                async with asker.http.post(
                    url, json=body, headers={**asker.headers, **headers}
                ) as response:
                    if asker.is_refused(response):
                        continue
                    if response.status != 202:
                        raise AssertionError(f"{response.status}: {await response.text()}")
                    return at, str((await response.json())["task_id"])
            except (aiohttp.ClientError, TimeoutError):
                self._ledger.reconnects += 1
        raise AssertionError("unreachable")

    async def _follow(
        self, at: int, task_id: str, cuts: list[int], rng: random.Random
    ) -> tuple[str, str]:
        """Read a task's events, each exactly once and in order, over any number of connections.
        Some clients forget the last events before they reconnect, and get them again."""
        last, texts = -1, list[str]()
        cuts = sorted(cuts, reverse=True)
        assert self._asker is not None
        while True:
            before = last
            headers = {"Last-Event-ID": str(last)} if last >= 0 else {}
            asked = rng.choice(self._world.orchestrators) if self._roams else None
            url = f"{(asked or self._world.orchestrators[at]).url}/v2/tasks/{task_id}/events"
            try:
                async with self._asker.http.get(url, headers=headers) as response:
                    if response.status in (404, 410):
                        return "gone", ""
                    if response.status != 200:
                        await asyncio.sleep(PAUSE_S)
                        continue
                    async with aclosing(events_of(response)) as events:
                        async for event in events:
                            if event.id is None:
                                continue  # metrics: between the numbers
                            is_error = event.name == "error"
                            if event.id != last + 1 and not (is_error and event.id > last):
                                self._ledger.fault(
                                    f"event {event.id} follows {last} in task {task_id}"
                                )
                            last = event.id
                            said = json.loads(event.data)
                            if event.name == "token":
                                texts.append(said["text"])
                            elif event.name == "end":
                                return "met", "".join(texts)
                            elif is_error:
                                return str(said["code"]), ""
                            if cuts and last >= cuts[-1]:
                                cuts.pop()
                                break
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(PAUSE_S)
            self._ledger.reconnects += 1
            if last > before and rng.random() < _FORGETS:
                last = rng.randrange(-1, last + 1)
                del texts[max(0, last + 1 - _FIRST_TOKEN) :]
