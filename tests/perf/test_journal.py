"""What a durable submission adds is told from the disk's own time, round by round, at a rate that
the machine carries."""

from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from perf.service import submissions
from perf.service.journal import OverHttp, _over_http
from perf.service.submissions import RATES, at_largest_rate


async def test_both_kinds_and_the_disk_are_measured_in_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    async def submit(request: web.Request) -> web.Response:
        asked.append((await request.json())["durable"])
        return web.json_response({}, status=202)

    monkeypatch.setattr(submissions, "MAX_QUEUED", float("inf"))  # however slow the machine is
    monkeypatch.setattr(submissions, "ALONE", 3)
    app = web.Application()
    app.router.add_post("/v2/tasks", submit)
    async with TestServer(app, host="127.0.0.1") as server:
        assert server.port is not None
        found = await _over_http(server.port, tmp_path, 0.05, 2)
    assert found.per_s == RATES[0]
    # A round to warm up, and two.
    assert sorted(asked) == [False] * 3 * (3 + 5) + [True] * 3 * 5
    for figures in (found.alone, found.plain, found.durable, found.fsync):
        assert len(figures) == 2 and all(figure > 0 for figure in figures)


@pytest.mark.parametrize(("carried", "chosen"), [(400, 200), (200, 200), (60, 50), (10, 25)])
async def test_the_largest_rate_that_the_machine_carries_is_the_one_that_is_told(
    carried: float, chosen: float
) -> None:
    """Beyond it a plain 202 waits for others."""

    async def measure(per_s: float) -> OverHttp:
        queue_ms = 0.0 if per_s <= carried else 900.0
        return OverHttp(per_s, [5.0], [8.0 + queue_ms], [12.0 + queue_ms], [1.0])

    found = await at_largest_rate(measure)
    assert found.per_s == chosen
    assert found.is_carried is (carried >= chosen)
