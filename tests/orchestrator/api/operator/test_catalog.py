"""``/v2/catalog``: pages, conditional answers, verification; names in placements (PV-4, PV-5)."""

import asyncio
import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from catalog.engines import EngineCatalog, EngineEntry
from catalog.models import ModelCatalog, ModelEntry, ModelFile, ModelFormat, ModelState
from orchestrator.api.operator import catalog as routes
from pool.engines.ensure import registered
from pool.engines.triton import find_triton
from protocol.model_digest import model_digest
from tests.orchestrator.conftest import OPERATOR, MakeService, MakeWorker, Service
from tests.pool.engines.test_ensure import make_server
from tests.support.cases import for_each
from tests.support.model_files import checkpoint

VERSION = "0.1.0, llama.cpp b11 (xllamacpp 7)"
"""As a card of llama.cpp tells it."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def register(home: Path, *numbers: int, digest: str = "") -> ModelCatalog:
    catalog = ModelCatalog(home)
    for number in numbers:
        entry = ModelEntry(
            id=f"m-{number}",
            name=f"model-{number}",
            state=ModelState.STAGING,
            format=ModelFormat.GGUF,
            source="hub:org/m" if number % 2 else "/home/somebody/models/m",
            created_ms=number,
            files=(ModelFile("a.gguf", 4, "00"),),
            digest=digest,
        )
        catalog.stage(entry)
        catalog.activate(entry)
    for path in catalog.folder.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))  # so long ago that it has settled
    return catalog


def register_engine(home: Path, version: str, **facts: Any) -> None:
    name = f"llamacpp-{version}"
    python = home / "engines" / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    entry = EngineEntry(id=name, engine="llamacpp", version=version, binary=str(python), **facts)
    EngineCatalog(home).put(entry)


async def get(
    service: Service, path: str, status: int = 200, **headers: str
) -> tuple[Any, dict[str, str]]:
    async with service.http.get(f"/v2/catalog{path}", headers=headers) as answer:
        assert answer.status == status, await answer.text()
        body = await answer.json() if status != 304 else await answer.read()
        return body, {name.lower(): value for name, value in answer.headers.items()}


async def verified(service: Service, entry: str) -> dict[str, Any]:
    """The entry's state, once it was asked for a verification that has ended."""
    path = f"/v2/catalog{entry}"
    async with service.http.post(f"{path}/verify", headers=OPERATOR) as asked:
        assert (asked.status, asked.headers["Location"]) == (202, f"{path}/state")
    while True:
        told: dict[str, Any] = await service.ask("GET", f"{path}/state")
        if told["verification"]["ended_ms"]:
            return told
        await asyncio.sleep(0.01)


async def test_models_come_in_pages_that_hold_while_others_come_and_go(
    service: Service, home: Path
) -> None:
    catalog = await asyncio.to_thread(register, home, 1, 2, 3, 4, 5)
    page, _ = await get(service, "/models?limit=2")
    assert [model["id"] for model in page["models"]] == ["m-1", "m-2"]
    await asyncio.to_thread(lambda: catalog.remove(catalog.get("m-2")))
    await asyncio.to_thread(register, home, 0)
    page, _ = await get(service, f"/models?limit=2&cursor={page['next_cursor']}")
    assert [model["id"] for model in page["models"]] == ["m-3", "m-4"]
    page, _ = await get(service, f"/models?limit=2&cursor={page['next_cursor']}")
    assert [model["id"] for model in page["models"]] == ["m-5"]
    assert page["next_cursor"] is None


@for_each(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("limit=000000001" + "9" * 5000, "limit"),
        ("cursor=x", "cursor"),
    ],
)
async def test_a_page_that_cannot_be_is_refused(service: Service, query: str, field: str) -> None:
    body, _ = await get(service, f"/models?{query}", 400)
    assert body["error"]["field"] == field


async def test_what_has_not_changed_is_not_sent_again(service: Service, home: Path) -> None:
    await asyncio.to_thread(register, home, 1)
    for path in ("/models", "/models/m-1", "/models/m-1/state"):
        _, headers = await get(service, path)
        tag = headers["etag"]
        body, again = await get(service, path, 304, **{"If-None-Match": f'"other", {tag}'})
        assert (body, again["etag"]) == (b"", tag)
        await get(service, path, 304, **{"If-None-Match": "*"})
        await get(service, path, 200, **{"If-None-Match": '"other"'})
    _, headers = await get(service, "/models")
    since = {"If-Modified-Since": headers["last-modified"]}
    await get(service, "/models", 304, **since)
    ahead = "Fri, 31 Dec 2100 23:59:59 GMT"  # of a wrong clock
    await get(service, "/models", 200, **{"If-Modified-Since": ahead})
    # a tag counts more than a date
    await get(service, "/models", 200, **since, **{"If-None-Match": '"other"'})

    def change() -> None:
        catalog = ModelCatalog(home)
        catalog.touch(catalog.get("m-1"))

    await asyncio.to_thread(change)
    await get(service, "/models", 200, **since)
    _, headers = await get(service, "/models")
    assert "last-modified" not in headers  # another change could come within the same second


async def test_answers_have_no_paths_of_the_machine(service: Service, home: Path) -> None:
    def fill() -> None:
        register(home, 1, 2)
        register_engine(
            home,
            "1",
            build_ref="path /opt/somewhere/else",
            created_ms=1,
            digest="d",
            build_flags=("CMAKE_ARGS=-DA=ON -DB=/usr/bin/ccache",),
            artifacts=(str(home / "engines" / "llamacpp-1"),),
        )

    await asyncio.to_thread(fill)
    models, _ = await get(service, "/models")
    assert [model["source"] for model in models["models"]] == ["hub:org/m", "local"]
    one, _ = await get(service, "/engines/llamacpp-1")
    assert one == {
        "id": "llamacpp-1",
        "engine": "llamacpp",
        "version": "1",
        "build_ref": "path else",
        "created_ms": 1,
        "digest": "d",
        "build_flags": ["CMAKE_ARGS=-DA=ON -DB=ccache"],
        "artifacts": ["llamacpp-1"],
        "compute_mode": "cpu",
        "verification": None,
    }


def register_whole(home: Path) -> ModelEntry:
    catalog = ModelCatalog(home)
    entry = ModelEntry("m", "m", ModelState.STAGING, ModelFormat.SAFETENSORS, "local", 1)
    folder = catalog.stage(entry)
    for name, content in checkpoint(3000).items():
        (folder / name).write_bytes(content)
    files = tuple(
        ModelFile(name, len(content), hashlib.sha256(content).hexdigest())
        for name, content in checkpoint(3000).items()
    )
    digest = model_digest(folder)
    return catalog.activate(msgspec.structs.replace(entry, files=files, digest=digest))


async def test_a_model_is_verified_next_to_the_service(service: Service, home: Path) -> None:
    catalog = ModelCatalog(home)
    entry = await asyncio.to_thread(register_whole, home)

    told = await verified(service, f"/models/{entry.id}")
    assert (told["state"], told["verification"]["state"]) == ("active", "passed")
    config = catalog.path_of(entry) / "config.json"
    await asyncio.to_thread(config.write_bytes, b"{}")
    told = await verified(service, f"/models/{entry.id}")
    assert (told["state"], told["verification"]["state"]) == ("broken", "failed")
    assert told["problem"].startswith("config.json has 2 bytes")


async def test_an_engine_is_verified_next_to_the_service(service: Service, home: Path) -> None:
    root = await asyncio.to_thread(make_server, home / "triton")
    entry = await asyncio.to_thread(lambda: registered(home, find_triton(root, home)))
    for harm, state in ((b"server", "passed"), (b"Server", "failed")):
        await asyncio.to_thread((root / "bin" / "tritonserver").write_bytes, harm)
        told = await verified(service, f"/engines/{entry.catalog_id}")
        assert told["verification"]["state"] == state


async def test_a_verification_that_runs_is_not_begun_twice(home: Path) -> None:
    verifications = routes.Verifications(lambda: home)
    with verifications._turn:
        asked = verifications.ask("models", "m-1")
        assert verifications.ask("models", "m-1") is asked
    while verifications.states["models", "m-1"].ended_ms is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert verifications.states["models", "m-1"].state == "failed"  # there is no such model


async def test_placements_name_the_entries_of_model_and_engine(
    make_worker: MakeWorker, make_service: MakeService, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await make_worker(model_digest="f" * 64, engine="llamacpp", engine_version=VERSION)

    def fill() -> None:
        register(home, 1, digest="e" * 64)
        register(home, 2, digest="f" * 64)
        register_engine(home, "7", build_ref="pip x", created_ms=int(1000 * time.time()))

    await asyncio.to_thread(fill)
    service = await make_service(worker)
    with caplog.at_level(logging.INFO, "orchestrator.service"):  # OR-15
        await service.ask("POST", "/v2/tasks", 202, json={"prompt": "a", "max_tokens": 2})
        await service.until(lambda: len(service.ends) == 1)
    (placed,) = [
        r.fields for r in caplog.records if getattr(r, "fields", {}).get("action") == "place"
    ]
    assert (placed["model_entry"], placed["engine_entry"]) == ("m-2", "llamacpp-7")
    (instance,) = (await service.ask("GET", "/v2/instances"))["instances"]
    assert (instance["model_entry"], instance["engine_entry"]) == ("m-2", "llamacpp-7")


async def test_problems_have_no_paths_of_the_machine(
    service: Service, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = await asyncio.to_thread(make_server, home.parent / "opt" / "triton")
    entry = await asyncio.to_thread(lambda: registered(home, find_triton(root, home)))
    server = root / "bin" / "tritonserver"
    await asyncio.to_thread(server.unlink)
    await asyncio.to_thread(server.mkdir)  # there, and nothing that can be read
    told = await verified(service, f"/engines/{entry.catalog_id}")
    assert told["verification"]["state"] == "failed"
    assert str(home.parent) not in str(told) and "/opt" not in str(told)
    await asyncio.to_thread((home / "models").mkdir)
    await asyncio.to_thread((home / "models" / "store").touch)
    with caplog.at_level(logging.WARNING, "orchestrator.service"):
        body, _ = await get(service, "/models", 503)
    assert str(home.parent) not in str(body)
    assert "models/store: Not a directory" in caplog.text
