"""How many connections there may be, in all and of one key."""

from contextlib import ExitStack

import pytest

from orchestrator.api.auth import Key, digest_of
from orchestrator.api.http import accepting
from orchestrator.api.http.accepting import most_connections
from orchestrator.api.server import KEY_SHARES
from tests.orchestrator.conftest import MakeService
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker


@for_each(("files", "most"), [(64, 32), (256, 128), (1024, 768), (65536, 65280)])
async def test_some_open_files_are_never_connections(
    monkeypatch: pytest.MonkeyPatch, files: int, most: int
) -> None:
    monkeypatch.setattr(accepting, "raise_file_limit", lambda: files)
    assert most_connections() == most


async def test_or24_one_key_leaves_connections_for_the_others(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """From however many addresses; without a second key there is nobody to share with."""
    keys = {name: {"token": f"sk-{name}"} for name in ("many", "other")}
    service = await make_service(worker, http__max_connections=40, keys=keys)
    app = service.runner.app
    assert app is not None
    mine, shares = Key("many", digest_of("sk-many")).fingerprint, app[KEY_SHARES]

    async def status_with(key: str) -> int:
        headers = {"x-api-key": f"sk-{key}"}
        async with service.http.get("/v2/tasks", headers=headers) as response:
            return response.status

    with ExitStack() as under_way:
        for _ in range(17):
            under_way.enter_context(shares.counted(mine))
        assert [await status_with("many"), await status_with("other")] == [200, 200]
        under_way.enter_context(shares.counted(mine))
        assert [await status_with("many"), await status_with("other")] == [503, 200]
    assert await status_with("many") == 200
