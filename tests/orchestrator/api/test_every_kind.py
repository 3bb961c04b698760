"""The soak's client of every kind knows every route, and what each answers (WK-9)."""

import asyncio
import random
import re
from pathlib import Path

import aiohttp

from perf.chaos.clients import ChaosLedger
from perf.chaos.every_kind import KINDS, EveryKind
from tests.orchestrator.api.tools import CARD
from tests.orchestrator.conftest import MakeService, MakeWorker

_OTHERS = (
    "/v2/slots",  # clips have a soak of their own
    "/admin",
    "/v2/instances/",
    "/v2/catalog",
    "/cancel",
    "/overview/events",  # for as long as somebody looks
    "POST /v2/instances",
)
"""Parts of routes that it leaves out; operators' are among them."""


async def test_every_kind_is_answered(
    make_worker: MakeWorker, make_service: MakeService, tmp_path: Path
) -> None:
    worker = await make_worker(**CARD, model="demo", grammars="llguidance")
    service = await make_service(worker, journal__path=str(tmp_path / "journal.sqlite"))
    while (await service.http.get("/v2/budget")).status == 503:  # noqa: ASYNC110 - its books open
        await asyncio.sleep(0.01)
    ledger = ChaosLedger()
    async with aiohttp.ClientSession() as http:
        client = EveryKind(http, service.url, ledger, random.Random(1))
        for _ in range(2 * len(KINDS)):
            await client.visit()
    assert ledger.faults == []
    assert service.runner.app is not None
    sent = [f"{method} {path}" for method, path, _ in KINDS]
    routes = {
        f"{route.method} {route.resource.canonical}"
        for route in service.runner.app.router.routes()
        if route.resource is not None and route.method in ("GET", "POST")
    }
    patterns = {
        route: re.compile(re.sub(r"{[^}]*}", "[^/]+", route))
        for route in routes
        if not any(part in route for part in _OTHERS)
    }
    missing = [r for r, known in patterns.items() if not any(map(known.fullmatch, sent))]
    assert not missing, "\n".join(missing)
