"""Takes and removes a model with a mishap at each change of the disk; for ``test_killed``.

    python -m tests.pool.artifacts.killed killed|full FOLDER [EVERY]

Every call that changes the disk is counted; a child that does the whole meets the mishap at the
first of them, the next one at the second, and so on, until one comes through. The mishap is a kill
after the change, or a disk that is full from there on, which has to end in a typed error. Each time
a new process reads the catalog, and does the whole again to its end. Prints how many there were.
With EVERY only each so-manieth change is tried.
"""

import asyncio
import errno
import itertools
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from catalog.checks import verify_model
from catalog.errors import ProvisionError
from catalog.models import ModelCatalog, ModelState
from pool.artifacts.staging import AddRequest, add_model
from tests.support.model_files import checkpoint

REFUSED = 3
"""The status of a child that ended with a typed error."""

CHANGES = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "link", "write")
GROW = ("mkdir", "fsync", "write")
"""What a full disk refuses."""


def add(home: Path, source: Path) -> None:
    request = AddRequest(str(source), copy=True, keep_free=0.0)
    asyncio.run(add_model(ModelCatalog(home), request))


def remove(home: Path, source: Path) -> None:
    catalog = ModelCatalog(home)
    for entry in catalog.entries():
        catalog.remove(entry)
    catalog.empty_trash()  # as whatever adds or removes a model next


def changed(names: tuple[str, ...], at: Callable[[Callable[[], object]], object]) -> None:
    """Have ``at`` make each of these changes of the disk."""

    def told(change: Callable[..., object]) -> Callable[..., object]:
        return lambda *args, **named: at(lambda: change(*args, **named))

    for name in names:
        setattr(os, name, told(getattr(os, name)))


def kill_at(count: int) -> None:
    """SIGKILL to ourselves after so many changes."""
    made = itertools.count(1)

    def at(change: Callable[[], object]) -> object:
        result = change()
        if next(made) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    changed(CHANGES, at)


def fill_at(count: int) -> None:
    """No space from the so-manieth change on."""
    tried = itertools.count(1)

    def at(change: Callable[[], object]) -> object:
        if next(tried) >= count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return change()

    changed(GROW, at)


def met_at(
    count: int,
    mishap: Callable[[int], None],
    work: Callable[[Path, Path], None],
    home: Path,
    source: Path,
) -> bool:
    """Whether the mishap came before the work was done."""
    child = os.fork()
    if child == 0:
        mishap(count)
        try:
            work(home, source)
        except ProvisionError:
            os._exit(REFUSED)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) in (0, REFUSED), (count, status)
    return os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == REFUSED


def check(home: Path, source: Path) -> None:
    """An active entry is whole."""
    catalog = ModelCatalog(home)
    for entry in catalog.entries():
        if entry.state is ModelState.ACTIVE:
            for file in source.iterdir():
                taken = catalog.path_of(entry) / file.name
                assert taken.read_bytes() == file.read_bytes(), file


def main(kind: str, folder: Path, every: int) -> int:
    mishap = {"killed": kill_at, "full": fill_at}[kind]
    source, home = folder / "source", folder / "home"
    source.mkdir()
    for name, content in checkpoint(3000).items():
        (source / name).write_bytes(content)
    print(sum(try_all(mishap, work, home, source, every) for work in (add, remove)))
    return 0


def try_all(
    mishap: Callable[[int], None],
    work: Callable[[Path, Path], None],
    home: Path,
    source: Path,
    every: int,
) -> int:
    for met, count in enumerate(range(1, 1000, every)):
        shutil.rmtree(home, ignore_errors=True)
        if work is remove:
            add(home, source)
        has_met = met_at(count, mishap, work, home, source)
        check(home, source)
        work(home, source)
        check(home, source)
        catalog = ModelCatalog(home)
        states = [verify_model(catalog, entry).state for entry in catalog.entries()]
        assert states == ([] if work is remove else [ModelState.ACTIVE]), states
        left = {str(f.relative_to(catalog.folder)) for f in catalog.folder.rglob("*.safetensors")}
        assert len(left) == len(states), left
        if not has_met:
            return met
    raise AssertionError("it never comes through")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int((sys.argv[3:] or ["1"])[0])))
