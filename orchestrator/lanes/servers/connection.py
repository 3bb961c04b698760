"""HTTP with one server: its facts, and jobs that are answered by event streams."""

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from orchestrator.lanes.servers.cards import BadFolder
from orchestrator.lanes.servers.job import JobFailed, ServerLost
from orchestrator.lanes.sse import EventReader, EventTooLong
from protocol import Code, excerpt

MAX_CONNECTIONS: Final = 4096
"""Maximum connections of a lane, one for each running job; more jobs wait."""
KEEP_S: Final = 4.0
"""Seconds that an idle connection is kept: less than servers keep it (uvicorn and llama.cpp: 5 s),
so that no job finds it closed."""
READ_BYTES: Final = 2**18
CONNECT_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 2**20
"""Maximum bytes read of an answer that is not a stream."""
_DONE: Final = b"[DONE]"
_KEY = re.compile(r"[!-~]+")
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_CODES = {
    400: Code.INVALID_REQUEST,
    413: Code.CONTEXT_OVERFLOW,
    422: Code.INVALID_REQUEST,
    429: Code.QUEUE_FULL,
    502: Code.NO_CAPACITY,
    503: Code.NO_CAPACITY,
    504: Code.NO_CAPACITY,
}
"""Codes for a job by HTTP status; any other status is the engine's fault."""


class ServerConnection:
    """A pool of connections to the server at ``base_url``. Create it on the event loop."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._key = ""
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS, limit_per_host=0, keepalive_timeout=KEEP_S
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Jobs have their own deadlines, and polls have a limit.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=READ_BYTES,
            auto_decompress=False,
            headers={"User-Agent": "tidegate", "Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        await self._http.close()

    async def read_key(self, path: Path) -> None:
        """Use the bearer token in the file ``path``. Raises ``BadFolder``."""
        try:
            key = (await asyncio.to_thread(path.read_text, "utf-8")).strip()
        except (OSError, ValueError) as error:
            # Without the file's path: a probe, which needs no key, shows why an instance is not up.
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise BadFolder(f"its key_file cannot be read: {why}") from None
        if not _KEY.fullmatch(key):
            raise BadFolder("its key_file must hold one key: a line of ASCII without spaces")
        self._key = key

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    async def get(self, path: str) -> bytes:
        """The body of a 200 answer. Raises ``ServerLost``, also for any other status."""
        try:
            async with self._http.get(
                f"{self._base_url}{path}", headers=self._headers, allow_redirects=False
            ) as response:
                body = await _body(response)
        except aiohttp.ClientError as error:
            raise ServerLost(f"cannot reach {self._base_url}: {_said(error)}") from None
        if response.status != 200:
            raise ServerLost(f"{path} answers {_status(response.status, body)}")
        return body

    async def get_object(self, path: str) -> dict[str, Any]:
        """The JSON object in a 200 answer. Raises ``ServerLost``."""
        body = await self.get(path)
        try:
            return _decode_object(body)
        except msgspec.DecodeError:
            raise ServerLost(
                f"{path} answers no JSON object: is this the server that its URL says?"
            ) from None

    async def events(
        self, path: str, request: dict[str, Any], correlation_id: str
    ) -> AsyncGenerator[bytes, None]:
        """The data of the events that answer a job. An early exit closes the connection, which
        tells the server to stop. Raises ``JobFailed`` and ``ServerLost``."""
        headers = self._headers | {"Content-Type": "application/json"}
        if correlation_id:
            headers["X-Request-Id"] = correlation_id
        url, body, reader = f"{self._base_url}{path}", msgspec.json.encode(request), EventReader()
        try:
            response = await self._http.post(url, data=body, headers=headers, allow_redirects=False)
            try:
                if response.status != 200:
                    code = _CODES.get(response.status, Code.ENGINE_ERROR)
                    said = _status(response.status, await _body(response))
                    raise JobFailed(code, f"its server answers {said}")
                async for chunk in response.content.iter_any():
                    for data in reader.feed(chunk):
                        if data == _DONE:
                            return
                        yield data
            finally:
                if response.content.at_eof():
                    response.release()  # its connection is used again
                else:
                    response.close()
        except aiohttp.ClientError as error:
            raise ServerLost(f"its connection broke: {_said(error)}") from None
        except EventTooLong as error:
            raise JobFailed(Code.ENGINE_ERROR, f"its server sent {error}") from None


class ServerEvent(msgspec.Struct):
    """The part of an event that every server may send: an error in the middle of a text."""

    error: msgspec.Raw = msgspec.Raw(b"null")


def decoded(decoder: "msgspec.json.Decoder[Any]", data: bytes) -> Any:
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


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """The body, cut at ``MAX_ANSWER_BYTES``: the connection is not used again then."""
    found = bytearray()
    while len(found) < MAX_ANSWER_BYTES:
        # One read may return a part.
        piece = await response.content.read(MAX_ANSWER_BYTES - len(found))
        if not piece:
            break
        found += piece
    return bytes(found)


def _status(status: int, body: bytes) -> str:
    said = _message(body)
    return f"{status}{f': {said}' if said else ''}"


def _message(body: bytes) -> str:
    """The message in an error's body for people, whatever its shape."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return excerpt(body.decode(errors="replace").strip(), 200)
    while isinstance(value, dict):
        value = next((v for n in ("error", "message", "detail") if (v := value.get(n))), str(value))
    return excerpt(str(value), 300)


def _said(error: Exception) -> str:
    return excerpt(str(error) or type(error).__name__, 200)
