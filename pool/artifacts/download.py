"""Fetches files over HTTP: several parts at once, each tried again where it broke off.

Nothing that a server says is trusted: a range that it did not give, a length other than the listed
one and bytes beyond it are noticed. The caller must check the digest, which shows whether the bytes
are right.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp

from catalog.errors import StagingFailed
from pool.artifacts.partial import NOTE_BYTES, PartialFile, Range, split

_READ_BYTES: Final = 2**20
_MAX_WAIT_S: Final = 60.0
_REDIRECTS: Final = 5
_REFUSED: Final = (401, 403, 404, 410, 416)
"""Statuses after which another try would get the same."""


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    connections: int = 8
    """Number of connections for all files together."""
    part_bytes: int = 64 * 2**20
    stall_s: float = 30.0
    """Seconds after which a connection over which nothing comes is given up."""
    attempts: int = 6
    """Tries of a part in a row that bring nothing before it is given up."""
    backoff_s: float = 0.5
    """Seconds before the second try of a part; doubled before each further one."""


class NotRanged(Exception):
    """The server sends only whole files."""


class _Broken(Exception):
    """A transfer broke off; it may be tried again after ``wait_s``."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Downloader:
    """Fetches over one pool of connections; an asynchronous context manager."""

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        limits: DownloadLimits | None = None,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        """``on_bytes`` is told the bytes of each piece written; negative numbers take some back."""
        self._limits = limits or DownloadLimits()
        self._headers = {**(headers or {}), "Accept-Encoding": "identity"}
        self._on_bytes = on_bytes
        self._free = asyncio.Semaphore(self._limits.connections)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Downloader":
        stall_s = self._limits.stall_s
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            auto_decompress=False,
            trust_env=True,
            connector=aiohttp.TCPConnector(limit=self._limits.connections),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def fetch(self, url: str, file: PartialFile) -> None:
        """Get the missing parts of a file. Raises ``StagingFailed``, and ``OSError`` of the disk;
        parts that came are kept for another time."""
        ranged = False
        while missing := list(split(file.missing(), self._limits.part_bytes)):
            try:
                # the first part shows whether the server gives parts at all
                await self._together(url, file, missing if ranged else missing[:1])
                ranged = True
            except NotRanged:
                self._on_bytes(-file.done_bytes)
                file.restart()
                await self._part(url, file, (0, file.size), whole=True)

    async def _together(self, url: str, file: PartialFile, parts: Sequence[Range]) -> None:
        tasks = [asyncio.create_task(self._part(url, file, part)) for part in parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _part(self, url: str, file: PartialFile, part: Range, *, whole: bool = False) -> None:
        begin, end = part
        failures = 0
        while begin < end:
            came = 0
            try:
                async with self._free:
                    came = await self._attempt(url, file, (begin, end), whole)
                    begin += came
                if begin < end:
                    raise _Broken(f"the transfer ended after {begin} of {file.size} bytes")
            except _Broken as error:
                # pieces that were noted before it broke need not come again
                at = _first_missing(file, (begin, end))
                has_progress = not whole and (at > begin or came > 0)
                failures = 0 if has_progress else failures + 1
                begin = at
                if failures >= self._limits.attempts:
                    raise StagingFailed(
                        f"{file.path.name} does not come from {url}: {error}, {failures} times in"
                        " a row; run the command again, which goes on from where this is"
                    ) from None
                if whole:
                    self._on_bytes(-file.done_bytes)
                    file.restart()
                    begin = 0
                wait_s = self._limits.backoff_s * 2 ** max(0, failures - 1)
                await asyncio.sleep(min(_MAX_WAIT_S, max(wait_s, error.wait_s)))

    async def _attempt(self, url: str, file: PartialFile, part: Range, whole: bool) -> int:
        """Get ``part``, or the beginning of it; returns how many of its bytes came. Raises
        ``_Broken``, ``NotRanged``, ``StagingFailed``."""
        assert self._session is not None
        begin, end = part
        headers = {} if whole else {"Range": f"bytes={begin}-{end - 1}"}
        try:
            async with self._session.get(url, headers=headers, max_redirects=_REDIRECTS) as answer:
                _check_status(answer, url, file.path.name)
                if answer.status == 206:
                    _check_range(answer, url, file, part)
                elif (begin, end) != (0, file.size):
                    raise NotRanged
                else:
                    _check_whole(answer, url, file)
                return await self._write(answer, file, part)
        except aiohttp.TooManyRedirects:
            raise StagingFailed(f"{url} redirects without an end") from None
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise StagingFailed(f"{url} redirects to an invalid address: {error}") from None
        except ValueError:  # aiohttp says no more than this
            raise StagingFailed(
                f"the address of {file.path.name}, or one that it redirects to, has a password in"
                " its address beside the token: leave out one of them"
            ) from None
        except TimeoutError:
            raise _Broken(f"nothing came for {self._limits.stall_s:g} s") from None
        except aiohttp.ClientError as error:
            raise _Broken(str(error) or type(error).__name__) from None

    async def _write(self, answer: aiohttp.ClientResponse, file: PartialFile, part: Range) -> int:
        begin, end = part
        at = noted = begin
        try:
            async for piece in answer.content.iter_chunked(_READ_BYTES):
                piece = piece[: end - at]
                # here and not on a thread, which would go on writing after a cancellation
                file.write(at, piece)
                at += len(piece)
                self._on_bytes(len(piece))
                if at - noted >= NOTE_BYTES:
                    file.note(noted, at)
                    noted = at
                if at == end:
                    break
        finally:
            file.note(noted, at)
        return at - begin


def _first_missing(file: PartialFile, part: Range) -> int:
    begin, end = part
    return next((max(begin, a) for a, b in file.missing() if b > begin and a < end), end)


def _check_status(answer: aiohttp.ClientResponse, url: str, name: str) -> None:
    status = answer.status
    if status in (200, 206):
        return
    if status in _REFUSED:
        raise StagingFailed(f"{name} is not to be had from {url}: the server answers {status}")
    wait = answer.headers.get("Retry-After", "")
    raise _Broken(f"the server answers {status}", float(wait) if wait.isdecimal() else 0.0)


def _check_whole(answer: aiohttp.ClientResponse, url: str, file: PartialFile) -> None:
    if answer.content_length not in (None, file.size):
        raise StagingFailed(
            f"{file.path.name} should have {file.size} bytes, and {url} sends"
            f" {answer.content_length}: the listing and the file do not belong together"
        )


def _check_range(answer: aiohttp.ClientResponse, url: str, file: PartialFile, part: Range) -> None:
    """Raise ``StagingFailed`` unless the answer is the range asked for, of the listed length."""
    begin, end = part
    told = answer.headers.get("Content-Range", "")
    if told not in (f"bytes {begin}-{end - 1}/{file.size}", f"bytes {begin}-{end - 1}/*"):
        raise StagingFailed(
            f"{file.path.name}: asked for bytes {begin}-{end - 1} of {file.size}, and {url} sends"
            f" {told!r}: the listing and the file do not belong together"
        )
