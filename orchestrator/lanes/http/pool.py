"""Shares one HTTP client among all lanes: its connections are kept, and bounded."""

import aiohttp

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
        """Count one user less; close the client after the last."""
        self._users -= 1
        if not self._users and self._session is not None:
            session, self._session = self._session, None
            await session.close()
