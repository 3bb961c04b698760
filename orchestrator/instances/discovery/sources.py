"""Sources of addresses, beside the addresses that the settings list.

A source is asked again and again; one that cannot answer raises ``SourceError``, and the caller
keeps its last answer: no list of instances is worse than an old one.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

from orchestrator.instances.discovery.addresses import DNS_PREFIX, FILE_PREFIX, check_address
from orchestrator.lanes import name_of

RESOLVE_EVERY_S: Final = 2.0
LOOK_EVERY_S: Final = 0.5
"""Seconds between two readings of a file, which costs next to nothing."""
MAX_FILE_BYTES = 2**20
ANSWER_S = 10.0
"""Seconds after which a resolver that has not answered counts as failed this time."""


class SourceError(Exception):
    """A source gave no usable list; the message says why, for people."""


class Source(Protocol):
    """A source of addresses that may change."""

    @property
    def name(self) -> str:
        """The source's name, as the settings spell it."""

    @property
    def every_s(self) -> float:
        """Seconds between two readings."""

    async def read(self) -> frozenset[str] | None:
        """All addresses there are now; None if nothing changed. Raises ``SourceError``."""


Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Gives the numeric addresses of a host name; raises ``OSError``."""


async def resolve(host: str, port: int) -> list[str]:
    """Every A and AAAA record of a host that the system's resolver knows. Raises ``OSError``."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class DnsName:
    """Every address behind one name, such as that of a headless service in Kubernetes."""

    def __init__(self, entry: str, resolver: Resolve = resolve) -> None:
        self.name = entry
        self.every_s = RESOLVE_EVERY_S
        host, _, port = entry.removeprefix(DNS_PREFIX).rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port)
        self._resolver = resolver
        self._asking: asyncio.Future[list[str]] | None = None
        """A question that was not answered in time. No other is asked beside it, for each holds one
        of the few threads that the event loop has for blocking calls."""

    async def read(self) -> frozenset[str] | None:
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._resolver(self._host, self._port))
        done, _ = await asyncio.wait([self._asking], timeout=ANSWER_S)
        if not done:
            raise SourceError(f"{self._host} cannot be resolved: no answer in {ANSWER_S:g} s")
        asked, self._asking = self._asking, None
        try:
            hosts = asked.result()
        except OSError as error:
            raise SourceError(f"{self._host} cannot be resolved: {error.strerror}") from None
        if not hosts:
            raise SourceError(f"{self._host} has no address")
        return frozenset(
            f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts
        )


class WatchedFile:
    """A file with one address per line; ``#`` begins a comment.

    A file is taken as a whole or not at all. One without any address, or whose last line has no
    end, is taken for half written.
    """

    def __init__(self, entry: str) -> None:
        self.name = entry
        self.every_s = LOOK_EVERY_S
        self._path = Path(entry.removeprefix(FILE_PREFIX))
        self._seen: tuple[int, int, int] | None = None

    async def read(self) -> frozenset[str] | None:
        return await asyncio.to_thread(self._read)

    def _read(self) -> frozenset[str] | None:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                version = (status.st_mtime_ns, status.st_size, status.st_ino)
                if version == self._seen:
                    return None
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            self._seen = None
            raise SourceError(f"{self._path} cannot be read: {error.strerror}") from None
        addresses = parse_addresses(data)
        self._seen = version  # only now: a broken file is complained of until it is mended
        return addresses


def parse_addresses(data: bytes) -> frozenset[str]:
    """The addresses in a file's contents. Raises ``SourceError`` with the line's number."""
    if len(data) > MAX_FILE_BYTES:
        raise SourceError(f"the file is larger than {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"byte {error.start} is not UTF-8") from None
    if text and not text.endswith("\n"):
        raise SourceError("the last line has no end; end it if the file is complete")
    addresses = set()
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        address = line.partition("#")[0].strip()
        if not address:
            continue
        try:
            name = name_of(check_address(address))
            if names.setdefault(name, address) != address:
                raise ValueError(f"an instance called {name} is there already")
            addresses.add(address)
        except ValueError as error:
            raise SourceError(f"line {number}: {error}") from None
    if not addresses:
        raise SourceError("there is no address in the file")
    return frozenset(addresses)


def source_of(entry: str) -> Source:
    """The source that an entry of the settings names, once ``check_entry`` has passed it."""
    return WatchedFile(entry) if entry.startswith(FILE_PREFIX) else DnsName(entry)
