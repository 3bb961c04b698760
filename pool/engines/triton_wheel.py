"""Extracts a Triton server from the ``nvidia-pytriton`` wheel, used as a binary distribution.

    .tidegate/triton-0.7.0/
      pytriton/tritonserver/bin/tritonserver
      pytriton/tritonserver/backends/python/…
      pytriton/tritonserver/python_backend_stubs/<3.x>/triton_python_backend_stub
      nvidia_pytriton.libs/…                     shared libraries, for LD_LIBRARY_PATH
      backends-<3.x>/python/…                    ours: the backend with the stub of one Python

A directory gets its final name only when it is complete, so an interrupted set-up can simply be
repeated. Standard library only.
"""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from catalog.atomic import sync_folder, sync_tree
from catalog.errors import FetchFailed, MachineUnfit
from pool.preflight.host import check_platform, libpython_dir, python_version, set_up_with

WHEEL = "nvidia-pytriton==0.7.0"
SERVER_VERSION = "2.51.0"
DOWNLOAD_MB = 55

PIP_ARGUMENTS = ("--no-deps", "--only-binary=:all:", WHEEL)
"""Arguments of ``pip install --target``; the dependencies are for a library that we do not use."""
_STUB = "triton_python_backend_stub"


def wheel_dir(home: Path) -> Path:
    """The folder of the wheel's contents below the state directory ``home``."""
    return home / f"triton-{WHEEL.partition('==')[2]}"


def server_dir(home: Path) -> Path:
    """The folder of the server inside the wheel."""
    return wheel_dir(home) / "pytriton" / "tritonserver"


def backend_dir(home: Path) -> Path:
    """The backend directory for the running Python."""
    return wheel_dir(home) / f"backends-{python_version()}"


def is_prepared(home: Path) -> bool:
    """Whether the server is there with a backend for the running Python."""
    return backend_dir(home).is_dir()


def is_downloaded(home: Path) -> bool:
    """Whether the wheel's contents are there, for any Python."""
    return wheel_dir(home).is_dir()


def prepare(home: Path, download: Callable[[Path], None]) -> None:
    """Make ``is_prepared`` true; ``download`` unpacks the wheel into the directory it is given.
    Raises ``MachineUnfit`` if the machine lacks a requirement. It checks first, and again at the
    end, because only the wheel shows which libpython it needs."""
    if is_prepared(home):
        return
    check_platform()
    if not is_downloaded(home):
        with completing(wheel_dir(home)) as target:
            download(target)
    lay_out(home)


def lay_out(home: Path) -> None:
    """Create the backend directory of the running Python from the download."""
    server = server_dir(home)
    stub = server / "python_backend_stubs" / python_version() / _STUB
    if not stub.exists():
        raise MachineUnfit(
            f"The Triton server of the wheel has no stub for Python {python_version()}: use "
            f"Python 3.11, 3.12 or 3.13 ({set_up_with('3.11')})"
        )
    libpython_dir(stub)
    (server / "bin" / "tritonserver").chmod(0o755)
    with completing(backend_dir(home)) as target:
        python = target / "python"
        python.mkdir()
        for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
            shutil.copy2(server / "backends" / "python" / name, python / name)
        shutil.copy2(stub, python / _STUB)
        (python / _STUB).chmod(0o755)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises ``FetchFailed`` while another process writes it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FetchFailed(
                f"another process is creating {folder}: try again when it is done"
            ) from None
        yield


@contextmanager
def completing(final: Path) -> Iterator[Path]:
    """An empty directory that becomes ``final`` once the body has filled it (``alone``)."""
    partial = final.with_name(final.name + ".partial")
    with alone(final):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            if not final.is_dir():  # otherwise another process has just finished
                sync_tree(partial)
                partial.rename(final)
                sync_folder(final.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
