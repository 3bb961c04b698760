"""Overrides product constants for a test or a benchmark: in this process, or in one that runs
``python -m perf.stack.constants '{"orchestrator.lanes.config.DOWN_AFTER_S": 30}' orchestrator``."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from catalog.paths import MODEL_REPOSITORY

_FIRST: Final = """\
import os
import sys

sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

from perf.stack.constants import set_constants

set_constants({values!r})
"""
_OURS: Final = ("clips", "orchestrator", "picker", "pool", "protocol", "worker")


def set_constants(values: Mapping[str, object]) -> Callable[[], None]:
    """Set constants, which are named with their modules, wherever they have been imported; some
    fields alone of one that has fields. Returns what sets them back."""
    before: list[tuple[object, str, object]] = []
    for path, value in values.items():
        module, _, name = path.rpartition(".")
        old = getattr(importlib.import_module(module), name)
        if isinstance(old, BaseModel) and isinstance(value, Mapping):
            value = old.model_copy(update=dict(value))
        for each in list(sys.modules.values()):
            package = getattr(each, "__name__", "").partition(".")[0]
            if package in _OURS and getattr(each, name, None) == old:
                before.append((each, name, old))
                setattr(each, name, value)

    def restore() -> None:
        for each, name, old in reversed(before):
            setattr(each, name, old)

    return restore


def repository_with(values: Mapping[str, object], folder: Path) -> Path:
    """Our model repository, written into ``folder``, whose models run with these constants."""
    shutil.copytree(MODEL_REPOSITORY, folder, dirs_exist_ok=True)
    for model in folder.glob("*/1/model.py"):
        model.write_text(_FIRST.format(values=dict(values)) + model.read_text())
    return folder


def with_constants(values: Mapping[str, object]) -> tuple[str, ...]:
    """The command of an orchestrator with these constants."""
    if not values:
        return (sys.executable, "-P", "-m", "orchestrator")
    return (sys.executable, "-m", "perf.stack.constants", json.dumps(dict(values)), "orchestrator")


if __name__ == "__main__":
    constants, module = sys.argv[1:]
    imported = importlib.import_module(f"{module}.__main__")
    set_constants(json.loads(constants))
    sys.argv = [module]
    sys.exit(imported.main())
