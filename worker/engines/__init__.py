"""Loads the engine that runs the model: our own, or a third-party one behind the same surface.

``load_engine`` is what the Triton model calls. Each engine but our own lives in a package here that
has ``build_engine(settings, clock)``, and is imported only when it is asked for: what it needs is
an optional extra.

- ``backend``  what a third-party engine has to do: batch, compute, sample
- ``stepped``  what is done for it: deadlines, aborts, order, accounts; ``needs``, ``stats``
"""

import time
from importlib import import_module

from worker.core import Clock
from worker.loaded import LoadedEngine
from worker.settings import WorkerSettings

_OTHERS = frozenset({"llamacpp", "transformers", "vllm"})


def load_engine(settings: WorkerSettings, clock: Clock = time.monotonic) -> LoadedEngine:
    """Load the model that ``settings`` name into the engine that they name.

    Raises what ``worker.engine.build.build_engine`` raises, and ``EngineMissing`` for an engine
    whose packages are not installed.
    """
    where = f"worker.engines.{settings.engine}" if settings.engine in _OTHERS else "worker.engine"
    builder = import_module(f"{where}.build")
    loaded = builder.build_engine(settings, clock)
    assert isinstance(loaded, LoadedEngine)
    return loaded
