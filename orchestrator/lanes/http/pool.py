"""One HTTP client for all lanes: its connections are kept, and bounded."""

import aiohttp

MAX_CONNECTIONS = 4096
"""A job has one to itself while it runs; more wait for one, until their deadline."""
KEEP_S = 4.0
"""Less than servers keep an idle one (uvicorn and llama.cpp: 5 s), lest a job meets its end."""
READ_BYTES = 2**18
CONNECT_S = 5.0


class HttpPool:
    """Opened by the first lane that needs it, closed by the last."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._users = 0

    def acquire(self) -> aiohttp.ClientSession:
        """The client, for one more user. ``release`` is to follow."""
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
        """One user less."""
        self._users -= 1
        if not self._users and self._session is not None:
            session, self._session = self._session, None
            await session.close()
