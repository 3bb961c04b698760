"""Constants of a worker that a test states among its settings."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import worker.runner.build  # noqa: F401 - what is imported while a constant is set keeps it
from perf.stack.constants import set_constants

_HOMES: Final = {
    "attention": "worker.runner.build.ATTENTION",
    "block_tokens": "worker.settings.BLOCK_TOKENS",
}


@contextmanager
def constants_among(values: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    """Set the constants among ``values`` for as long as a worker is built; gives the settings."""
    restore = set_constants({home: values[n] for n, home in _HOMES.items() if n in values})
    try:
        yield {name: value for name, value in values.items() if name not in _HOMES}
    finally:
        restore()
