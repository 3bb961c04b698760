"""Processes that are killed, and two at once: the catalog stays true (PV-4)."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from catalog.errors import StagingFailed
from catalog.models import MANIFEST, ModelCatalog, ModelState
from tests.pool.artifacts.test_staging_hub import add as add_from_hub
from tests.pool.artifacts.test_staging_hub import nothing_is_active, whole
from tests.pool.artifacts.test_staging_local import add, make_folder
from tests.support.hub import Faults, Hub
from tests.support.model_files import checkpoint
from tests.support.processes import python

EVERY = "3"
"""Changes of the disk that are tried; by hand all of them were."""
ROOT = Path(__file__).parents[3]
_ADD = """
import asyncio, sys
from pathlib import Path
from huggingface_hub import constants
from catalog.models import ModelCatalog
from pool.artifacts.staging import AddRequest, add_model
constants.DOWNLOAD_CHUNK_SIZE, constants.HF_HUB_DOWNLOAD_TIMEOUT = 500, 60
request = AddRequest("org/model", keep_free=0.0)
asyncio.run(add_model(ModelCatalog(Path(sys.argv[1])), request))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mishap", ["killed", "full"])
def test_a_mishap_at_any_change_of_the_disk_leaves_nothing_half_registered(
    tmp_path: Path, mishap: str
) -> None:
    run = python("-m", "tests.pool.artifacts.killed", mishap, tmp_path, EVERY, cwd=ROOT)
    assert int(run.stdout) > 10


async def test_a_download_that_was_killed_goes_on_where_it_was(
    catalog: ModelCatalog, start_hub: Callable[[Hub], Awaitable[str]]
) -> None:
    hub = Hub(checkpoint(6000), Faults(stall_after=3000, times=99))
    await start_hub(hub)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _ADD, str(catalog.folder.parent), cwd=ROOT
    )
    # Its first bytes are written, and it waits for the others; small files come whole meanwhile.
    parts = "model.safetensors.part"
    while not any(part.stat().st_size >= 2500 for part in catalog.folder.rglob(parts)):
        assert process.returncode is None
        await asyncio.sleep(0.01)
    with pytest.raises(StagingFailed, match="another process is at work on"):
        await add_from_hub(catalog)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert nothing_is_active(catalog)
    hub.faults = Faults()
    hub.sent.clear()
    entry = await add_from_hub(catalog)
    assert hub.sent["model.safetensors"] <= len(hub.files["model.safetensors"]) - 2500
    assert whole(catalog, hub, entry)


async def test_a_model_whose_entry_is_damaged_can_be_added_again(
    catalog: ModelCatalog, tmp_path: Path
) -> None:
    entry = await add(catalog, make_folder(tmp_path / "mine"))
    for damage in (b"", b'{"id": "mine", "entr', b"\xff\xfe", b'{"id": "other"}'):
        (catalog.path_of(entry) / MANIFEST).write_bytes(damage)
        assert catalog.entries() == ()
    await add(catalog, tmp_path / "mine")
    assert [(each.id, each.state) for each in catalog.entries()] == [(entry.id, entry.state)]


@pytest.mark.slow
def test_two_processes_that_write_lose_nothing_of_each_other(
    catalog: ModelCatalog, tmp_path: Path
) -> None:
    script = """
import sys
from pathlib import Path
from catalog.models import ModelCatalog
from catalog.models import ModelEntry, ModelFormat, ModelState
catalog = ModelCatalog(Path(sys.argv[1]))
for i in range(15):
    name = f"{sys.argv[2]}-{i}"
    entry = ModelEntry(name, name, ModelState.STAGING, ModelFormat.GGUF, "", i)
    catalog.stage(entry)
    catalog.activate(entry)
"""
    home = str(catalog.folder.parent)
    processes = [
        subprocess.Popen([sys.executable, "-c", script, home, name], cwd=ROOT) for name in "abc"
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(catalog.entries()) == 45
    assert all(entry.state is ModelState.ACTIVE for entry in catalog.entries())
