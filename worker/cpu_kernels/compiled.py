"""Loops that numba compiles for this CPU, if numba is installed (``tidegate[cpu]``).

Each torch operator costs a few microseconds, which dominates a decode of a few rows of a small
model. Everything is compiled while the worker loads. Compiled code is cached on disk (next to the
module, or in NUMBA_CACHE_DIR), so that only the first start pays for it.
"""

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from worker.log import model_log

Function = Callable[..., Any]
"""A compiled function. It takes numpy arrays and numbers, only of its signature's types."""

FASTMATH: Final = ("arcp", "contract", "nsz", "reassoc")
"""LLVM's fast-math flags: sums may be reordered; infinities (masks) and NaNs remain exact."""


class _State:
    problem: str | None = None
    is_known = False


def compiler_problem() -> str | None:
    """Why nothing can be compiled here; None if the compiler works."""
    if not _State.is_known:
        _State.is_known = True
        try:
            import numba

            if getattr(numba.config, "DISABLE_JIT", 0):
                give_up("NUMBA_DISABLE_JIT is set")
        except Exception as error:  # its libraries may be missing or incompatible
            give_up(f"numba cannot be imported ({error}); pip install numba, or run without it")
    return _State.problem


def give_up(problem: str) -> None:
    """Stop compiling and using compiled code: torch's operators do everything from now on."""
    _State.problem, _State.is_known = problem, True
    model_log.warning("CPU loops are not compiled, which is slower: %s", problem)


def toolchain() -> str:
    """Versions and CPU that, with our code, fix the machine code; empty without a compiler."""
    if compiler_problem() is not None:
        return ""
    import llvmlite
    import numba
    from llvmlite import binding

    # CPUs with the same name may show different features, especially virtual ones.
    features = hashlib.sha256(binding.get_host_cpu_features().flatten().encode()).hexdigest()[:8]
    versions = f"numba {numba.__version__}, llvmlite {llvmlite.__version__}"
    return f"{versions}, {binding.get_host_cpu_name()} {features}"


@cache
def cpu_features() -> frozenset[str]:
    """CPU features that numba compiles for; NUMBA_CPU_NAME may exclude some of the CPU's."""
    from numba.core.registry import cpu_target

    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(each[1:] for each in features.split(",") if each.startswith("+"))


def has_dots() -> bool:
    """Whether code may use AVX-512's bfloat16 dot products."""
    return "avx512bf16" in cpu_features()


def compiled(signature: str, *constants: object) -> Callable[[Function], Function]:
    """Compile a function with numba's ``signature`` to machine code that runs without the GIL.

    Closure variables are constants to the compiler; pass their values as ``constants``. Raises
    ``ImportError`` without numba, and numba's errors for code that it cannot compile.
    """

    def compile_it(function: Function) -> Function:
        from numba import njit

        made: Function = compiled_once(njit, signature, function, constants, nogil=True)
        return made

    return compile_it


def compiled_once(
    compiler: Callable[..., Any],
    signature: object,
    function: Function,
    constants: tuple[object, ...],
    **options: object,
) -> Any:
    """Compile ``function`` with ``compiler`` (numba's ``njit`` or ``cfunc``); cache it on disk if
    there is room. For ``constants`` see ``compiled``.
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if hasattr(cell.cell_contents, "_uuid"):
            raise TypeError(
                f"{function.__name__} takes {name}, compiled code, from a closure: numba's cache"
                " would find it in no other process; have it in the module's globals"
            )
    # numba keeps all versions of a name in one index, which it writes without a lock: two processes
    # with different constants would mix up their versions. So each version gets its own name.
    parts = inspect.getsource(function), repr(signature), FASTMATH, constants, toolchain()
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    function.__qualname__ = f"{function.__name__}_{key}"
    options |= {"error_model": "numpy", "fastmath": set(FASTMATH)}
    try:
        return compiler(signature, cache=True, **options)(function)
    except (RuntimeError, OSError) as error:  # no cache directory, or no room in it
        model_log.warning("compiled loops cannot be cached (%s): each start compiles them", error)
        return compiler(signature, **options)(function)
