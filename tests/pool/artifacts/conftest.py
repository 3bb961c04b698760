"""A hub on loopback, and a state folder."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from catalog.models import ModelCatalog
from tests.support.hub import Hub
from tests.support.sites import running_app

StartHub = Callable[[Hub], Awaitable[str]]


@pytest.fixture
def catalog(tmp_path: Path) -> ModelCatalog:
    return ModelCatalog(tmp_path / "home")


@pytest.fixture
async def start_hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartHub]:
    """Starts a hub and has ``huggingface_hub`` ask it; its address."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    async with AsyncExitStack() as stack:

        async def start(hub: Hub) -> str:
            port = await stack.enter_async_context(running_app(hub.app()))
            stack.callback(hub.closing.set)
            url = f"http://127.0.0.1:{port}"
            monkeypatch.setenv("HF_ENDPOINT", url)
            return url

        yield start
