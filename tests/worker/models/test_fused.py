"""What a fused kernel gives, compared with torch's own operators.

On CUDA, and under triton's interpreter in a process of its own (``test_interpreted.py``).
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from tests.support.compiled_kernels import Launch, usage_of
from worker.cpu_kernels.compiled import compiler_problem
from worker.models.fused import (
    _kernels,
    add_normed_,
    gated,
    launch_add_norm,
    launch_gate,
    launch_rotate,
    rotate_,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check_all(device: torch.device) -> int:
    """Compare on random shapes; → how many comparisons there were."""
    kernels = _kernels()
    assert kernels is not None
    generator = torch.Generator().manual_seed(5)
    cpu = torch.device("cpu")
    done = 0

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def compare(got: torch.Tensor, expected: torch.Tensor) -> None:
        nonlocal done
        error = (got.to(cpu).double() - expected.double()).norm() / expected.double().norm()
        assert error < TOLERANCE[expected.dtype], (got.dtype, got.shape, error)
        done += 1

    for dtype in DTYPES:
        for rows, width in ((1, 48), (5, 100), (3, 2304)):
            x, y, weight = (normal(*s).to(dtype) for s in ((rows, width), (rows, width), (width,)))
            mine = x.to(device, copy=True)
            out = launch_add_norm(kernels, mine, y.to(device), weight.to(device), 1e-5)
            expected = add_normed_(x, y, weight, 1e-5)
            compare(out, expected)
            compare(mine, x)
            both = normal(rows, 2 * width).to(dtype)
            compare(launch_gate(kernels, both.to(device)), gated(both))
        for tokens, heads, dim in ((1, 3, 16), (4, 10, 64), (2, 9, 80)):
            # Heads of one token lie side by side, those that are not rotated behind them.
            x = normal(tokens, heads + 2, dim).to(dtype)
            cos, sin = normal(tokens, 1, dim).to(dtype), normal(tokens, 1, dim).to(dtype)
            mine = x.to(device, copy=True)
            launch_rotate(kernels, mine[:, :heads], cos.to(device), sin.to(device))
            rotate_(x, heads, cos, sin)
            compare(mine, x)
    return done


@pytest.mark.parametrize("compiles", [True, False])
def test_on_the_cpu_they_do_as_their_formulas_say(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled loops in float32, and torch's operators where nothing compiles."""
    if compiles:
        assert compiler_problem() is None
    else:
        monkeypatch.setattr("worker.models.fused.compiler_problem", lambda: "none here")
    generator = torch.Generator().manual_seed(6)
    x, y, heads = (torch.randn(*s, generator=generator) for s in ((5, 96), (5, 96), (5, 7, 64)))
    weight = torch.randn(96, generator=generator)
    cos, sin = (torch.randn(5, 1, 64, generator=generator) for _ in range(2))
    summed, rotated = x.clone(), heads.clone()
    normed = add_normed_(summed, y, weight, 1e-5)
    rotate_(rotated, 4, cos, sin)
    total = x.double() + y.double()
    mean_square = total.square().mean(-1, keepdim=True)
    torch.testing.assert_close(summed.double(), total, rtol=1e-5, atol=1e-5)
    expected = total / (mean_square + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-5)
    turned = heads[:, :4] * cos + torch.cat((heads[:, :4, 32:], heads[:, :4, :32]), -1) * sin
    torch.testing.assert_close(rotated[:, :4], turned)
    torch.testing.assert_close(rotated[:, 4:], heads[:, 4:])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda() -> None:
    assert check_all(torch.device("cuda")) == 36


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in test_interpreted.py")
def test_interpreted() -> None:
    assert check_all(torch.device("cpu")) == 36


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_they_compile_for_a_gpu_that_is_not_here(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes of an 8B Llama."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = _kernels()
    assert kernels is not None
    launches = [Launch(getattr(kernels, name)) for name in ("add_norm", "rotate", "gate")]

    class Recording:
        add_norm, rotate, gate = launches

    x = torch.zeros(2, 4096, dtype=dtype)
    launch_add_norm(Recording, x, x, x[0], 1e-5)  # type: ignore[arg-type]
    heads, table = torch.zeros(2, 48, 128, dtype=dtype), torch.zeros(2, 1, 128, dtype=dtype)
    launch_rotate(Recording, heads[:, :40], table, table)  # type: ignore[arg-type]
    launch_gate(Recording, torch.zeros(2, 2 * 14336, dtype=dtype))  # type: ignore[arg-type]
    for launch in launches:
        (kernel,) = launch.compiled(90)
        assert usage_of(kernel).spilled_bytes == 0
