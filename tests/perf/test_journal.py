"""What a durable submission adds is told from the disk's own time, round by round."""

from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer

from perf.service.journal import _over_http


async def test_both_kinds_and_the_disk_are_measured_in_each_round(tmp_path: Path) -> None:
    asked: list[bool] = []

    async def submit(request: web.Request) -> web.Response:
        asked.append((await request.json())["durable"])
        return web.json_response({}, status=202)

    app = web.Application()
    app.router.add_post("/v2/tasks", submit)
    async with TestServer(app, host="127.0.0.1") as server:
        assert server.port is not None
        found = await _over_http(server.port, tmp_path, 0.05, 2)
    assert sorted(asked) == [False] * 15 + [True] * 15  # a round to warm up, and two
    for figures in (found.plain, found.durable, found.fsync):
        assert len(figures) == 2 and all(figure > 0 for figure in figures)
