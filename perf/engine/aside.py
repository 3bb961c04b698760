"""Computing beside an engine without slowing it down."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def aside(call: Callable[[], T]) -> T:
    """The result of ``call`` on a thread that ends with it.

    OpenMP keeps workers for every thread that has computed, and when there are more of them than
    cores none may spin any more: the engine's steps would take a third longer from then on.
    """
    with ThreadPoolExecutor(1, "bench-aside") as pool:
        return pool.submit(call).result()
