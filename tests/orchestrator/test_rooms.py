"""OR-28: what is optional can be deleted. Rooms are found here as the service finds them."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import aiohttp
import pytest

from orchestrator.settings.rooms import modules_of_rooms
from tests.support.fake_worker import FakeWorker
from tests.test_layers import ROOT

ROOMS = sorted(
    {
        Path(str(module.__file__)).parent.relative_to(ROOT).as_posix()
        for name in ("extension", "section", "sharing")
        for module in modules_of_rooms(name)
    }
)
SERVED_AT = {
    "clips": "/v2/slots",
    "orchestrator/api/openai/responses": "/v1/responses",
    "orchestrator/api/page": "/",
    "orchestrator/batches": "/v1/batches",
    "orchestrator/budgets": "/v2/budget",
    "orchestrator/sessions": "/v2/sessions",
}
"""A path of each room that has some: nothing is there without the room."""
CORE = ("catalog", "orchestrator", "protocol", "worker")


def test_these_are_the_optional_rooms() -> None:
    assert sorted([*SERVED_AT, "orchestrator/state", "picker"]) == ROOMS


def test_the_core_names_no_optional_room() -> None:
    packages = "|".join(re.escape(room.replace("/", ".")) for room in ROOMS)
    named = re.compile(rf"^\s*(?:from|import) ({packages})\b", re.M)
    for file in (file for root in CORE for file in (ROOT / root).rglob("*.py")):
        for found in named.finditer(file.read_text("utf-8")):
            assert file.is_relative_to(ROOT / found[1].replace(".", "/")), file


def copy_without(rooms: Iterable[str], folder: Path) -> None:
    ignored = shutil.ignore_patterns("checkpoint")
    for package in (*CORE, "clips", "picker"):
        if package not in rooms:
            shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    for room in rooms:
        shutil.rmtree(folder / room, ignore_errors=True)


async def serve_without(rooms: tuple[str, ...], folder: Path, worker: FakeWorker) -> None:
    """Start the service from a copy of the tree, ask it for a text, and stop it."""
    await asyncio.to_thread(copy_without, rooms, folder)
    own = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "orchestrator", "--port", "0", "--instances", worker.address),
        cwd=folder,
        env=own | {"TIDEGATE_HEALTH__PORT": "-1", "TIDEGATE_TELEMETRY__LOG_FORMAT": "json"},
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        port = 0
        while not port:
            line = (await process.stderr.readline()).decode()
            assert line, "it ended before it listened"
            found = re.search(r'"port": ?(\d+)', line) if "listening" in line else None
            port = 0 if found is None else int(found[1])
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            body = {"prompt": "a b", "max_tokens": 2}
            for _ in range(200):
                async with http.post("/v1/completions", json=body) as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.05)
            assert response.status == 200
            if "orchestrator/budgets" in rooms:
                bounded = body | {"session_id": "s", "max_run_tokens": 9}
                async with http.post("/v1/completions", json=bounded) as response:
                    assert response.status == 400 and "max_run_tokens" in await response.text()
            for room in rooms:
                if room in SERVED_AT:
                    async with http.get(SERVED_AT[room]) as response:
                        assert response.status == 404, room
    finally:
        process.send_signal(signal.SIGTERM)
        rest = (await process.communicate())[1].decode()
    assert process.returncode == 0, rest


async def test_the_service_starts_without_any_optional_room(
    tmp_path: Path, worker: FakeWorker
) -> None:
    await serve_without(tuple(ROOMS), tmp_path, worker)


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
async def test_the_service_starts_without_each(
    room: str, tmp_path: Path, worker: FakeWorker
) -> None:
    await serve_without((room,), tmp_path, worker)
