"""Loops compiled for the CPU at hand by numba, where it is installed.

torch's own operators cost some microseconds each, whatever they do; a decode of a few rows of a
small model is little else. What is compiled is kept on disk (numba's cache: beside the module, or
in the user's cache directory), so that only a first start pays for it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from worker.log import model_log

Function = Callable[..., Any]
"""A compiled one: it takes numpy arrays and numbers."""


@cache
def compiler_problem() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return f"numba cannot be imported ({error}); pip install numba, or go on without it"
    return None


def compiled(function: Function) -> Function:
    """``function`` as machine code that runs without the GIL. Raises ``ImportError`` without numba.

    Closure variables are constants to the compiler. Sums may be taken in any order (``fastmath``
    without its promise that there are no infinities and NaNs: masks and broken models have them).
    """
    from numba import njit

    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"contract", "reassoc", "arcp", "nsz"},
    }
    try:
        kept: Function = njit(cache=True, **options)(function)
        return kept
    except RuntimeError as error:  # no directory to keep it in
        model_log.warning("compiled kernels are not kept (%s): each start compiles them", error)
        made: Function = njit(**options)(function)
        return made
