"""What the port says while the journal is read, and to how many at a time (OR-14)."""

import asyncio
from itertools import islice

from orchestrator.api.starting import MAX_CONNECTIONS, saying_that_it_starts
from pool.process.http_get import get
from pool.process.ports import free_ports


async def test_a_crowd_takes_no_more_files_than_a_few() -> None:
    (port,) = await asyncio.to_thread(free_ports, 1)
    async with saying_that_it_starts("127.0.0.1", port):
        coming = [asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MAX_CONNECTIONS)]
        crowd = await asyncio.gather(*coming)
        status, body = await get("127.0.0.1", port, "/v1/models")
        assert status == 503 and b"starting" in body
        assert await get("127.0.0.1", port, "/health/live") == (200, b'{"status":"starting"}')
        ends = [asyncio.create_task(reader.read()) for reader, _ in crowd]
        for end in islice(asyncio.as_completed(ends, timeout=10.0), 2 * MAX_CONNECTIONS):
            assert await end == b""
    await asyncio.gather(*ends)
    for _, writer in crowd:
        writer.close()
