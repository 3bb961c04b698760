"""The common part of lanes over HTTP: requests, event streams, and what their failures mean."""

import asyncio
import random
import re
from abc import abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import aiohttp
import msgspec

from orchestrator.clock import Clock
from orchestrator.lanes.base import LaneOwner
from orchestrator.lanes.cards import BadFolder, ModelFolder, ServerFacts, make_card
from orchestrator.lanes.config import LaneConfig
from orchestrator.lanes.endpoint import Endpoint
from orchestrator.lanes.http.sse import EventTooLong, SseDecoder, SseEvent
from orchestrator.lanes.lane_job import JobFailed, LaneJob, ServerLost
from orchestrator.lanes.polled import PolledLane
from protocol import Code, Feature, ModelCard, excerpt

MAX_CONNECTIONS = 4096
"""Most connections: a job has one to itself while it runs; more jobs wait, until their deadline."""
KEEP_S = 4.0
"""Seconds that an idle connection is kept: less than servers keep one (uvicorn and llama.cpp: 5 s),
lest a job meets its end."""
READ_BYTES = 2**18
CONNECT_S = 5.0


class HttpPool:
    """The shared HTTP client, opened by the first lane that needs it and closed by the last."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._users = 0

    def acquire(self) -> aiohttp.ClientSession:
        """The client, for one more user, who must call ``release`` later."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=MAX_CONNECTIONS, limit_per_host=0, keepalive_timeout=KEEP_S
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Jobs have deadlines of their own, and polls a limit.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                read_bufsize=READ_BYTES,
                auto_decompress=False,
                headers={"User-Agent": "tidegate", "Accept-Encoding": "identity"},
            )
        self._users += 1
        return self._session

    async def release(self) -> None:
        self._users -= 1
        if not self._users and self._session is not None:
            session, self._session = self._session, None
            await session.close()


MAX_ANSWER_BYTES = 2**20
"""Most bytes read of an answer that is not a stream."""
_MAX = 2**31
_KEY = re.compile(r"[!-~]+")
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_CODES = {
    400: Code.INVALID_REQUEST,
    401: Code.ENGINE_ERROR,
    403: Code.ENGINE_ERROR,
    404: Code.ENGINE_ERROR,
    413: Code.CONTEXT_OVERFLOW,
    422: Code.INVALID_REQUEST,
    424: Code.ENGINE_ERROR,
    429: Code.QUEUE_FULL,
    502: Code.NO_CAPACITY,
    503: Code.NO_CAPACITY,
    504: Code.NO_CAPACITY,
}
"""What a status means for a job; any other one is the engine's fault."""


class HttpLane(PolledLane):
    """A lane to a server's HTTP API, over the pool that all lanes share. A kind of server states
    these facts, and adds ``_facts`` and ``_generate``."""

    lacks: tuple[Feature, ...] = ()
    abort_ms: float
    slots: int
    """Jobs at once where neither the operator nor the server says."""
    running: re.Pattern[bytes] | None = None
    """Finds the jobs in the server's ``/metrics``; None if it has none there."""
    takes_ids = False

    def __init__(
        self,
        endpoint: Endpoint,
        config: LaneConfig,
        owner: LaneOwner,
        clock: Clock,
        rng: random.Random,
        pool: HttpPool,
    ) -> None:
        super().__init__(endpoint, config, owner, clock, rng)
        self._pool = pool
        self._http: aiohttp.ClientSession | None = None
        self._headers: dict[str, str] = {}

    def start(self) -> None:
        if self._http is None:
            self._http = self._pool.acquire()
        super().start()

    async def _disconnect(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await self._pool.release()

    @abstractmethod
    async def _facts(self, folder: ModelFolder) -> ServerFacts:
        """What the server tells of itself. Raises ``ServerLost``."""

    async def _reach(self, folder: ModelFolder) -> ModelCard:
        await self._read_key()
        await self._get("/health")
        told = await self._facts(folder)
        return make_card(
            self.endpoint,
            folder,
            told,
            lacks=self.lacks,
            abort_ms=self.abort_ms,
            slots=self.slots,
            takes_ids=self.takes_ids,
        )

    async def _poll(self) -> int | None:
        await self._get("/health")
        if self.running is None:
            return None
        return jobs_in(await self._get_or("/metrics", b""), self.running)

    async def _read_key(self) -> None:
        """Read the server's key at each connection: it may change. Raises ``BadFolder``."""
        path = self.endpoint.key_file
        if path is None:
            return
        try:
            key = (await asyncio.to_thread(path.read_text, "utf-8")).strip()
        except (OSError, ValueError) as error:
            # Without the file's path: a probe, which needs no key, shows why an instance is not up.
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise BadFolder(f"its key_file cannot be read: {why}") from None
        if not _KEY.fullmatch(key):
            raise BadFolder("its key_file must hold one key: a line of ASCII without spaces")
        self._headers = {"Authorization": f"Bearer {key}"}

    async def _get(self, path: str) -> bytes:
        """The body of a 200 answer. Raises ``ServerLost``, also for any other status."""
        assert self._http is not None
        try:
            url = f"{self.endpoint.base_url}{path}"
            async with self._http.get(
                url, headers=self._headers, allow_redirects=False
            ) as response:
                body = await _body(response)
        except aiohttp.ClientError as error:
            raise ServerLost(f"cannot reach {self.endpoint.base_url}: {_said(error)}") from None
        if response.status != 200:
            said = _message(body)
            raise ServerLost(f"{path} answers {response.status}{f': {said}' if said else ''}")
        return body

    async def _get_object(self, path: str) -> dict[str, Any]:
        """The JSON object in a 200 answer. Raises ``ServerLost``."""
        body = await self._get(path)
        try:
            return _decode_object(body)
        except msgspec.DecodeError:
            raise ServerLost(
                f"{path} answers no JSON object: is this the server that its URL says?"
            ) from None

    async def _get_or(self, path: str, otherwise: bytes) -> bytes:
        """The body of a 200 answer, or ``otherwise`` if the server has none there."""
        try:
            return await self._get(path)
        except ServerLost:
            return otherwise

    async def _events(
        self, job: LaneJob, path: str, body: dict[str, Any]
    ) -> AsyncGenerator[SseEvent, None]:
        """Events of the answer to a request. A reader that leaves (``aclosing``) closes the
        connection, which tells the server that the rest is not wanted.

        Raises ``JobFailed`` and ``ServerLost``; a body that just ends is for the reader to judge.
        """
        assert self._http is not None
        headers = {**self._headers, "Content-Type": "application/json"}
        if job.correlation_id:
            headers["X-Request-Id"] = job.correlation_id
        url = f"{self.endpoint.base_url}{path}"
        decoder = SseDecoder()
        try:
            response = await self._http.post(
                url, data=msgspec.json.encode(body), headers=headers, allow_redirects=False
            )
            try:
                if response.status != 200:
                    said = _message(await _body(response))
                    raise _failed(response.status, said)
                async for chunk in response.content.iter_any():
                    for event in decoder.feed(chunk):
                        yield event
            finally:
                if response.content.at_eof():
                    response.release()  # its connection is used again
                else:
                    response.close()
        except aiohttp.ClientError as error:
            raise ServerLost(f"its connection broke: {_said(error)}") from None
        except EventTooLong as error:
            raise JobFailed(Code.ENGINE_ERROR, f"its server sent {error}") from None


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """The body, cut at ``MAX_ANSWER_BYTES``: the connection is not used again then."""
    found = bytearray()
    while len(found) < MAX_ANSWER_BYTES:
        # One read gives what is there by now, which may be a part.
        piece = await response.content.read(MAX_ANSWER_BYTES - len(found))
        if not piece:
            break
        found += piece
    return bytes(found)


def count_of(value: object) -> int:
    """A count of tokens or slots that a server told; 0 if ``value`` is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return value if 0 < value < _MAX else 0


def jobs_in(metrics: bytes, pattern: re.Pattern[bytes]) -> int | None:
    """The sum of the numbers that ``pattern`` finds; None if it finds no usable number."""
    found = pattern.findall(metrics)
    try:
        return round(sum(map(float, found))) if found else None
    except (ValueError, OverflowError):
        return None


class ServerEvent(msgspec.Struct):
    """The part of an event that every server may send: an error in the middle of a text."""

    error: msgspec.Raw = msgspec.Raw(b"null")


_E = TypeVar("_E", bound=ServerEvent)


def decoded(decoder: "msgspec.json.Decoder[_E]", data: memoryview) -> _E:
    """Decode one event. Raises ``JobFailed`` for an error, or data that is no such event."""
    try:
        event = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = f"its server sent no event of its API: {error}"
        raise JobFailed(Code.ENGINE_ERROR, what) from None
    if bytes(event.error) != b"null":
        said = _message(bytes(event.error))
        is_full = "overloaded" in said.lower()  # text-generation-inference's word for a full queue
        code = Code.QUEUE_FULL if is_full else Code.ENGINE_ERROR
        raise JobFailed(code, f"its server failed: {said}")
    return event


def _failed(status: int, said: str) -> Exception:
    code = _CODES.get(status, Code.ENGINE_ERROR)
    return JobFailed(code, f"its server answers {status}{f': {said}' if said else ''}")


def _message(body: bytes) -> str:
    """The message in an error's body for people, whatever its shape."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return excerpt(body.decode(errors="replace").strip(), 200)
    return excerpt(error_text(value), 300)


def error_text(value: object) -> str:
    if isinstance(value, dict):
        for name in ("error", "message", "detail"):
            if value.get(name):
                return error_text(value[name])
    return value if isinstance(value, str) else str(value)


def _said(error: Exception) -> str:
    return excerpt(str(error) or type(error).__name__, 200)
