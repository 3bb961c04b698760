"""Imports that tolerate Ctrl-C, and the location of the code that serves: ``orchestrator``,
``worker``, ``model_repository``.

A wheel has them in ``tidegate/_runtime``, a checkout at its top level. These general names could
clash with a user's own packages, so only processes that serve can import them: the folder is on
the path of the command that starts them, and on ``PYTHONPATH`` of its child processes.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
_PACKAGE = Path(__file__).resolve().parents[1]


@contextmanager
def importing(*, serving: bool = False) -> Iterator[None]:
    """Let Ctrl-C end the process at once, because an interrupted import may raise another error:
    numpy turns ``KeyboardInterrupt`` into an ``ImportError``. ``serving`` also makes the serving
    packages importable."""
    if serving:
        add_to_path()
    is_main = threading.current_thread() is threading.main_thread()  # others get no signals
    # keep an ignored signal ignored
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def folder() -> Path:
    """Directory that has the serving packages."""
    installed = _PACKAGE / "_runtime"
    return installed if installed.is_dir() else _PACKAGE.parents[1]


def add_to_path() -> None:
    """Make the serving packages importable in this process, before anything else of their names."""
    if sys.path[0] != str(folder()):
        sys.path.insert(0, str(folder()))


def become(module: str, given: Mapping[str, object]) -> NoReturn:
    """Replace this process by ``python -m module`` with the options in ``given`` that are set."""
    named = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    options = [str(w) for each in named.items() if each[1] is not None for w in each]
    # Ctrl-C waits until the module can handle it: its ``__main__`` unblocks the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # -P: ignore a folder of that name in the working directory.
        command = [sys.executable, "-P", "-m", module, *options]
        path = os.pathsep.join(filter(None, [str(folder()), os.environ.get("PYTHONPATH")]))
        os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
