"""A Triton server out of the ``nvidia-pytriton`` wheel, used as a binary distribution.

    .tidegate/triton-0.7.0/
      pytriton/tritonserver/bin/tritonserver
      pytriton/tritonserver/backends/python/…
      pytriton/tritonserver/python_backend_stubs/<3.x>/triton_python_backend_stub
      nvidia_pytriton.libs/…                     shared libraries, for LD_LIBRARY_PATH
      backends-<3.x>/python/…                    ours: the backend with the stub of one Python

A directory appears under its final name only when it is complete, so an interrupted set-up is
repeated and nothing else has to be remembered. Standard library only.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from orchestrator.pool.errors import MachineUnfit
from orchestrator.pool.preflight.host import check_platform, libpython_dir, python_version

WHEEL = "nvidia-pytriton==0.7.0"
SERVER_VERSION = "2.51.0"

_STUB = "triton_python_backend_stub"


def wheel_dir(home: Path) -> Path:
    """Where the wheel's contents live below the state directory ``home``."""
    return home / f"triton-{WHEEL.partition('==')[2]}"


def server_dir(home: Path) -> Path:
    """The server inside of the wheel."""
    return wheel_dir(home) / "pytriton" / "tritonserver"


def backend_dir(home: Path) -> Path:
    """The backend directory for the running Python."""
    return wheel_dir(home) / f"backends-{python_version()}"


def is_prepared(home: Path) -> bool:
    """Whether the server is there and its backend fits the running Python."""
    return backend_dir(home).is_dir()


def prepare(home: Path, download: Callable[[Path], None]) -> None:
    """Make ``is_prepared`` true; ``download`` unpacks the wheel into the directory it is given.

    Raises ``MachineUnfit`` for what the machine lacks, first of all and again at the end, since
    which libpython is needed shows only in the wheel.
    """
    if is_prepared(home):
        return
    check_platform()
    root = wheel_dir(home)
    if not root.is_dir():
        _complete(root, download)
    server = server_dir(home)
    stub = server / "python_backend_stubs" / python_version() / _STUB
    if not stub.exists():
        raise MachineUnfit(
            f"The Triton server of the wheel has no stub for Python {python_version()}: "
            "make clean && make PYTHON=python3.11"
        )
    libpython_dir(stub)
    (server / "bin" / "tritonserver").chmod(0o755)
    _complete(backend_dir(home), lambda target: _lay_out(server, stub, target / "python"))


def _lay_out(server: Path, stub: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy2(server / "backends" / "python" / name, target / name)
    shutil.copy2(stub, target / _STUB)
    (target / _STUB).chmod(0o755)


def _complete(final: Path, fill: Callable[[Path], None]) -> None:
    """Have ``fill`` write into a directory that becomes ``final`` when it returns."""
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    fill(partial)
    partial.rename(final)
