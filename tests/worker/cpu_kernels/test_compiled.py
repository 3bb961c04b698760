"""The compiler is a help, never a condition."""

import sys
from pathlib import Path

import numpy as np
import pytest

from worker.cpu_kernels import compiled as subject
from worker.cpu_kernels.compiled import compiled, compiler_problem


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject._State, "problem", None)
    monkeypatch.setattr(subject._State, "is_known", False)


def times(factor: int) -> subject.Function:
    @compiled("i8(i8)", factor)
    def times(x: int) -> int:
        return factor * x

    return times


def test_functions_of_different_constants_keep_apart() -> None:
    """numba would keep them under one index, and two processes could swap them."""
    two, three = times(2), times(3)
    assert (two(7), three(7)) == (14, 21)
    assert two.__qualname__ != three.__qualname__
    assert times(2).__qualname__ == two.__qualname__


def test_compiled_code_in_a_closure_is_refused_since_each_start_would_compile_it_again() -> None:
    inner = times(7)
    with pytest.raises(TypeError, match="takes inner"):

        @compiled("i8(i8)")
        def twice(x: int) -> int:
            return inner(inner(x))  # type: ignore[no-any-return]


def test_where_nothing_can_be_kept_each_start_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import numba

    njit = numba.njit

    def full_disk(signature: str, *, cache: bool = False, **options: object) -> object:
        if cache:
            raise OSError(28, "No space left on device")
        return njit(signature, **options)

    monkeypatch.setattr(numba, "njit", full_disk)
    assert times(5)(2) == 10
    assert "No space left" in caplog.text


@pytest.mark.parametrize("broken", [ImportError("none"), OSError("libllvmlite.so: no such file")])
def test_without_numba_it_says_why(
    broken: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "numba":
                raise broken

    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert str(broken) in (compiler_problem() or "")
    assert "pip install numba" in caplog.text
    assert subject.toolchain() == ""


def test_everything_is_compiled_by_the_time_a_worker_is_ready() -> None:
    """Only stated types are taken, so that no request ever waits for a compilation."""
    function = times(4)
    assert np.asarray(function.signatures).size == 1
    with pytest.raises(TypeError, match="No matching definition"):
        function(Path())
