"""Libraries that only some tests need, imported where the first of them is used.

Each process that runs a share of the suite collects all of it: these would cost each four seconds.
An annotation is a use: a module that has one of these in an annotation begins with
``from __future__ import annotations``.
"""

import importlib
import sys
from typing import Any


class Lazy:
    """Stands for a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for marks of its own at all that a module has
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


anthropic = Lazy("anthropic")
openai = Lazy("openai")
transformers = Lazy("transformers")


def loaded() -> set[str]:
    """Which of these are imported by now."""
    return {"anthropic", "openai", "transformers"} & sys.modules.keys()
