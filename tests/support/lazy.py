"""Libraries that only some tests need, imported where the first of them is used.

Each process that runs a share of the suite collects all of it: these would cost each four seconds.
"""

import importlib
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
