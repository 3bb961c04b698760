"""Placeholder until the drawing lands."""

from collections.abc import Sequence
from pathlib import Path


def draw(cells: Sequence[object], stem: Path) -> list[Path]:
    """Draws nothing yet."""
    return []
