"""Models and engines on the orchestrator's machine."""

from collections.abc import AsyncIterator
from urllib.parse import quote, urlencode

import msgspec

from tidegate.transport import Call, Transport

_PAGE = 200


class CatalogFile(msgspec.Struct, frozen=True):
    """A file of a model; ``path`` is relative to the model's folder."""

    path: str
    bytes: int
    sha256: str


class Verification(msgspec.Struct, frozen=True):
    """Check of a model's or engine's files: ``state`` is ``waiting``, ``running``, ``passed`` or
    ``failed``. Times are Unix milliseconds."""

    state: str
    asked_ms: int
    ended_ms: int | None = None
    problem: str = ""


class CatalogModel(msgspec.Struct, frozen=True):
    """A model of the catalog: ``state`` is ``staging``, ``active`` or ``broken``, then with a
    ``problem``."""

    id: str
    name: str
    state: str
    format: str
    source: str
    bytes: int
    created_ms: int
    revision: str = ""
    licence: str = ""
    digest: str = ""
    files: tuple[CatalogFile, ...] = ()
    used_ms: int = 0
    verified_ms: int = 0
    problem: str = ""
    verification: Verification | None = None


class CatalogEngine(msgspec.Struct, frozen=True):
    """An engine of the catalog; ``compute_mode`` is ``cpu`` or ``cuda``."""

    id: str
    engine: str
    version: str
    build_ref: str
    created_ms: int
    compute_mode: str = "cpu"
    digest: str = ""
    build_flags: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    verification: Verification | None = None


class _Page(msgspec.Struct, frozen=True):
    next_cursor: str | None
    models: tuple[CatalogModel, ...] = ()
    engines: tuple[CatalogEngine, ...] = ()


class _Asked(msgspec.Struct, frozen=True):
    verification: Verification


class Catalog:
    """Calls on the orchestrator's models and engines: what ``Client.catalog`` offers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def models(self) -> list[CatalogModel]:
        """All models, oldest first."""
        return [model async for page in self._pages("models") for model in page.models]

    async def engines(self) -> list[CatalogEngine]:
        """All engines, oldest first."""
        return [engine async for page in self._pages("engines") for engine in page.engines]

    async def model(self, id: str) -> CatalogModel:
        """Get one model. Raises ``NotFound``."""
        return await self._transport.call(Call("GET", _path("models", id)), CatalogModel)

    async def engine(self, id: str) -> CatalogEngine:
        """Get one engine. Raises ``NotFound``."""
        return await self._transport.call(Call("GET", _path("engines", id)), CatalogEngine)

    async def verify(self, id: str) -> Verification:
        """Have every byte of a model read again; ``model`` has the result. For operators."""
        return await self._verify("models", id)

    async def verify_engine(self, id: str) -> Verification:
        """Have every byte of an engine read again; ``engine`` has the result. For operators."""
        return await self._verify("engines", id)

    async def _verify(self, kind: str, id: str) -> Verification:
        call = Call("POST", f"{_path(kind, id)}/verify")
        return (await self._transport.call(call, _Asked)).verification

    async def _pages(self, kind: str) -> AsyncIterator[_Page]:
        cursor: str | None = ""
        while cursor is not None:
            asked = {"limit": str(_PAGE)} | ({"cursor": cursor} if cursor else {})
            call = Call("GET", f"/v2/catalog/{kind}?{urlencode(asked)}")
            page = await self._transport.call(call, _Page)
            yield page
            cursor = page.next_cursor


def _path(kind: str, id: str) -> str:
    return f"/v2/catalog/{kind}/{quote(id, safe='')}"
