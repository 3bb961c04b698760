"""Takes and removes a model with a kill after each change to the disk; run by ``test_killed``.

    python -m tests.orchestrator.pool.artifacts.killed FOLDER

Every call that changes the disk is counted; a child that does the whole is killed at the first of
them, the next one at the second, and so on, until one comes through. After each kill a new process
reads the catalog, and does the whole again to its end. Prints how many kills there were.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from orchestrator.pool.artifacts.catalog import ModelCatalog
from orchestrator.pool.artifacts.entries import ModelState
from orchestrator.pool.artifacts.room import DiskBudget
from orchestrator.pool.artifacts.staging import Wish, add_model
from orchestrator.pool.artifacts.verify import verify_model
from tests.support.model_files import checkpoint

CHANGES = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "link", "write")


def add(home: Path, source: Path) -> None:
    wish = Wish(str(source), copy=True, budget=DiskBudget(keep_free=0.0))
    asyncio.run(add_model(ModelCatalog(home), wish))


def remove(home: Path, source: Path) -> None:
    catalog = ModelCatalog(home)
    for entry in catalog.entries():
        catalog.remove(entry)
    catalog.empty_trash()  # as whatever adds or removes a model next


def die_at(count: int) -> None:
    """SIGKILL to ourselves after so many changes."""
    seen = 0

    def counted(change: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **named: object) -> object:
            nonlocal seen
            result = change(*args, **named)
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))


def killed_at(count: int, work: Callable[[Path, Path], None], home: Path, source: Path) -> bool:
    child = os.fork()
    if child == 0:
        die_at(count)
        work(home, source)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


def check(home: Path, source: Path) -> None:
    """An active entry is whole, and an index that is made from the folders says the same."""
    catalog = ModelCatalog(home)
    entries = catalog.entries()
    for entry in entries:
        if entry.state is ModelState.ACTIVE:
            for file in source.iterdir():
                taken = catalog.path_of(entry) / file.name
                assert taken.read_bytes() == file.read_bytes(), file
    if catalog.file.exists():
        catalog.file.rename(catalog.file.with_name("aside.json"))
        rebuilt = ModelCatalog(home).entries()
        catalog.file.with_name("aside.json").rename(catalog.file)
        assert [(e.id, e.state) for e in rebuilt] == [(e.id, e.state) for e in entries]


def main(folder: Path) -> int:
    source, home = folder / "source", folder / "home"
    source.mkdir()
    for name, content in checkpoint(3000).items():
        (source / name).write_bytes(content)
    kills = 0
    for work in (add, remove):
        for count in range(1, 1000):
            shutil.rmtree(home, ignore_errors=True)
            if work is remove:
                add(home, source)
            was_killed = killed_at(count, work, home, source)
            check(home, source)
            work(home, source)
            check(home, source)
            catalog = ModelCatalog(home)
            states = [verify_model(catalog, entry).state for entry in catalog.entries()]
            assert states == ([ModelState.ACTIVE] if work is add else []), states
            left = {
                str(f.relative_to(catalog.folder)) for f in catalog.folder.rglob("*.safetensors")
            }
            assert len(left) == len(states), left
            if not was_killed:
                break
            kills += 1
    print(kills)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
