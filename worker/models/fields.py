"""Typed reads of a checkpoint's JSON files; errors name the file and the field. No torch."""

import json
from pathlib import Path
from typing import Any

from worker.errors import BrokenCheckpoint, UnsupportedModel
from worker.models.families import OTHERWISE
from worker.models.folder import why_unservable


class Fields:
    """One JSON object."""

    def __init__(self, file: Path, values: dict[str, Any]) -> None:
        self.file = file
        self.values = values

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BrokenCheckpoint(f"{self.file}: {name} must be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise BrokenCheckpoint(f"{self.file}: {name} must be a positive number, got {value!r}")
        return float(value)

    def refuse(self, name: str, allowed: tuple[object, ...]) -> None:
        value = self.values.get(name)
        if value not in allowed:
            raise UnsupportedModel(
                f"{self.file}: {name}={value!r} is not supported;"
                f" this worker runs models with {name}={allowed[0]!r}; {OTHERWISE}"
            )


def read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise BrokenCheckpoint(why_unservable(file.parent) or f"{file} is missing") from error
    except NotADirectoryError as error:
        raise BrokenCheckpoint(why_unservable(file.parent) or str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise BrokenCheckpoint(f"{file} must hold a JSON object, got {type(values).__name__}")
    return values
