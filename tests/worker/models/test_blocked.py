"""Weights in blocks, against float64; and what a machine without the kernel does."""

import logging

import pytest
import torch

from tests.worker.models.test_linear import error, random
from worker.models import block_products, blocked, loader
from worker.models.block_products import Form, products_problem, tiles_problem
from worker.models.blocked import BlockedFormat, blocks_fit
from worker.models.linear import PackedFormat
from worker.models.loader import Layout

SHAPES = ((64, 96), (33, 70), (15, 6), (500, 129))

needs_kernel = pytest.mark.skipif(
    products_problem() is not None, reason=f"no kernel: {products_problem()}"
)


@pytest.fixture(params=Form, ids=lambda form: form.name.lower())
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    """Each that this machine has, whichever is its fastest."""
    chosen: Form = request.param
    if chosen == Form.TILES and (problem := tiles_problem()):
        pytest.skip(problem)
    if chosen == Form.BFLOAT16:
        monkeypatch.setattr(block_products, "tiles_problem", lambda: "not now")
    return chosen


def dtype_of(form: Form) -> torch.dtype:
    return torch.float32 if form == Form.FLOAT32 else torch.bfloat16


def rows_for(form: Form, *shape: int) -> torch.Tensor:
    """Such as AMX need not round."""
    return random(*shape, seed=2).to(dtype_of(form)).float()


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 16, 31, 32, 33, 70])
def test_products_are_right(form: Form, shape: tuple[int, int], rows: int) -> None:
    """Blocks that are not full, odd inputs, several passes over the rows."""
    weight, other = (random(*shape, seed=seed).to(dtype_of(form)) for seed in (0, 1))
    x, bias = rows_for(form, rows, shape[1]), random(shape[0], seed=3)
    exact = x.double() @ weight.double().T
    gated = torch.nn.functional.silu(exact) * (x.double() @ other.double().T)
    with torch.inference_mode():
        made = BlockedFormat()
        plain = made.linear([weight], None)
        assert plain.form == (Form.FLOAT32 if shape[1] % 2 else form)
        assert error(plain(x), exact) < 1e-6
        assert error(made.linear(weight.split(9), bias)(x), exact + bias.double()) < 1e-6
        assert error(made.gated([weight, other])(x), gated) < 2e-6
        assert error(made.gated([torch.cat((weight, other))])(x), gated) < 2e-6


@needs_kernel
def test_a_row_is_the_same_in_any_company(form: Form) -> None:
    """To the bit, on any CPU: each sum is made in one order (WK-3)."""
    x = random(70, 200)
    made = BlockedFormat()
    layer, gated = (
        make([random(160, 200, seed=1).to(dtype_of(form))]) for make in (plain(made), made.gated)
    )
    for product in (layer, gated):
        together = product(x)
        for rows in (slice(1), slice(3, 15), slice(7, 20), slice(39, 40), slice(2, 60)):
            assert torch.equal(product(x[rows]), together[rows])


@needs_kernel
def test_amx_rounds_rows_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nearest, ties to even; by several threads at once."""
    if problem := tiles_problem():
        pytest.skip(problem)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3F808001], dtype=torch.int32)
    rest = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 3e38, -1e-3, 1 / 3, 65504.0])
    x = torch.cat((ties.view(torch.float32), rest)).repeat(50, 1)
    x[:, len(ties) :] *= torch.linspace(1, 1.1, 50)[:, None]
    one = torch.eye(x.shape[1], dtype=torch.bfloat16)
    for i in range(x.shape[1]):  # a column at a time: infinity times zero is no number
        column = torch.zeros_like(x)
        column[:, i] = x[:, i]
        out = BlockedFormat().linear([one], None)(column)
        assert torch.equal(out[:, i].nan_to_num(7), column[:, i].bfloat16().float().nan_to_num(7))


def plain(form: BlockedFormat):  # type: ignore[no-untyped-def]
    return lambda parts: form.linear(parts, None)


@needs_kernel
def test_extremes_and_missing_numbers_pass_through(form: Form) -> None:
    weight = torch.eye(16, dtype=dtype_of(form))
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([1e4, -1e4, torch.nan, 3.0])
    out = BlockedFormat().gated([weight, torch.ones_like(weight)])(x.nan_to_num(0.0))
    assert out[0, 0] > 0
    assert abs(out[0, 1]) < 1e-30
    assert BlockedFormat().gated([weight, weight])(x).isnan().any()


@needs_kernel
def test_threads_share_the_blocks(form: Form) -> None:
    x, weight = rows_for(form, 9, 64), random(1000, 64, seed=1).to(dtype_of(form))
    layer = BlockedFormat().linear([weight], None)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert error(layer(x), x.double() @ weight.double().T) < 1e-6
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_without_permission_amx_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_products, "_features", lambda: {"amx-tile": True, "amx-bf16": True})
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    problem = block_products.tiles_problem.__wrapped__()
    assert problem == "the system does not let this process use AMX"
    monkeypatch.setattr(block_products, "tiles_problem", lambda: problem)
    assert block_products.fastest_form(torch.bfloat16) == Form.BFLOAT16
    assert not block_products.has_tiles()


@pytest.mark.parametrize("why", ["no compiler", "it does not compile"])
def test_without_the_kernel_onednn_does_it(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(form: Form, *, is_gated: bool) -> None:
        raise RuntimeError("unknown instruction")

    monkeypatch.setattr(blocked, "product", broken)
    monkeypatch.setattr(
        blocked, "products_problem", lambda: "numba is not there" if why == "no compiler" else None
    )
    with caplog.at_level(logging.INFO):
        assert not blocks_fit(torch.bfloat16)
        assert isinstance(loader._format(Layout(), torch.bfloat16), PackedFormat)
    assert "CPU loops are not compiled" not in caplog.text, "all else stays compiled"
    assert "matrix products are left to oneDNN: " in caplog.text


def test_float16_has_no_blocks() -> None:
    assert not blocks_fit(torch.float16)
