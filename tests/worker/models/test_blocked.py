"""Weights in blocks, against float64; and what a machine without the kernel does."""

import logging

import pytest
import torch

from tests.worker.models.test_linear import error, random
from worker.models import blocked, loader
from worker.models.block_products import products_problem
from worker.models.blocked import BlockedFormat, blocks_fit
from worker.models.linear import PackedFormat
from worker.models.loader import Layout

DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((64, 96), (33, 70), (15, 6), (500, 129))

needs_kernel = pytest.mark.skipif(
    products_problem() is not None, reason=f"no kernel: {products_problem()}"
)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 31])
def test_products_are_right(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    """Blocks that are not full, odd inputs, several passes over the rows."""
    weight, other = random(*shape).to(dtype), random(*shape, seed=1).to(dtype)
    x, bias = random(rows, shape[1], seed=2), random(shape[0], seed=3)
    exact = x.double() @ weight.double().T
    gated = torch.nn.functional.silu(exact) * (x.double() @ other.double().T)
    with torch.inference_mode():
        form = BlockedFormat()
        assert error(form.linear([weight], None)(x), exact) < 1e-6
        assert error(form.linear(weight.split(9), bias)(x), exact + bias.double()) < 1e-6
        assert error(form.gated([weight, other])(x), gated) < 2e-6
        assert error(form.gated([torch.cat((weight, other))])(x), gated) < 2e-6


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    """To the bit, on any CPU: each sum is made in one order (WK-3)."""
    x = random(40, 200)
    form = BlockedFormat()
    layer, gated = (
        make([random(160, 200, seed=1).to(dtype)]) for make in (plain(form), form.gated)
    )
    for made in (layer, gated):
        together = made(x)
        for rows in (slice(1), slice(3, 15), slice(7, 20), slice(39, 40)):
            assert torch.equal(made(x[rows]), together[rows])


def plain(form: BlockedFormat):  # type: ignore[no-untyped-def]
    return lambda parts: form.linear(parts, None)


@needs_kernel
def test_extremes_and_missing_numbers_pass_through() -> None:
    weight = torch.eye(16)
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([1e4, -1e4, torch.nan, 3.0])
    out = BlockedFormat().gated([weight, torch.ones(16, 16)])(x.nan_to_num(0.0))
    assert out[0, 0] > 0
    assert abs(out[0, 1]) < 1e-30
    assert BlockedFormat().gated([weight, weight])(x).isnan().any()


@needs_kernel
def test_threads_share_the_blocks() -> None:
    x, weight = random(3, 64), random(1000, 64, seed=1)
    layer = BlockedFormat().linear([weight], None)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert error(layer(x), x.double() @ weight.double().T) < 1e-6
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("why", ["no compiler", "it does not compile", "matrix unit"])
def test_without_the_kernel_onednn_does_it(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(dtype: torch.dtype, *, is_gated: bool) -> None:
        raise RuntimeError("unknown instruction")

    monkeypatch.setattr(blocked, "product", broken)
    monkeypatch.setattr(
        blocked, "products_problem", lambda: "numba is not there" if why == "no compiler" else None
    )
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: why == "matrix unit")
    with caplog.at_level(logging.INFO):
        assert not blocks_fit(torch.bfloat16)
        assert isinstance(loader._format(Layout(), torch.bfloat16), PackedFormat)
    assert "CPU loops are not compiled" not in caplog.text, "all else stays compiled"
    assert "matrix products are left to oneDNN: " in caplog.text


def test_float16_has_no_blocks() -> None:
    assert not blocks_fit(torch.float16)
