"""``python -m perf.attack.health HOST PORT …``: times health checks until stdin ends.

Prints a JSON list of milliseconds for each port; one that fails counts as a whole second.
"""

import asyncio
import json
import sys
import time

from perf.load.connection import HttpConnection, HttpError

_EVERY_S = 0.02
_FAILED_MS = 1000.0


async def _main(host: str, *ports: int) -> list[list[float]]:
    over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    return await asyncio.gather(*(_probe(host, port, over) for port in ports))


async def _probe(host: str, port: int, over: asyncio.Future[str]) -> list[float]:
    latencies = []
    while not over.done():
        began = time.perf_counter()
        try:
            async with asyncio.timeout(5), HttpConnection(host, port) as http:
                http.send("GET", "/health/live")
                await http.answer()
            latencies.append(1000 * (time.perf_counter() - began))
        except (OSError, HttpError, TimeoutError, asyncio.IncompleteReadError):
            latencies.append(_FAILED_MS)
        await asyncio.sleep(_EVERY_S)
    return latencies


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_main(sys.argv[1], *map(int, sys.argv[2:])))))
