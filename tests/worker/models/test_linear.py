"""Every way that a linear layer can lie in memory, against float64."""

import pytest
import torch

from worker.errors import UnsupportedModel
from worker.models.linear import DenseFormat, Format, Int8Format, PackedFormat, packs, quantise

FORMATS: dict[str, Format] = {
    "dense": DenseFormat(),
    "packed": PackedFormat(),
    "int8": Int8Format(),
}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3}
INT8_STEP = 1 / 127


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def needs_packed(dtype: torch.dtype) -> None:
    if not packs(dtype):
        pytest.skip(f"oneDNN has no packed {dtype} layers on this CPU")


@pytest.fixture(params=FORMATS, ids=list(FORMATS))
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_products_are_right(form: Format, dtype: torch.dtype) -> None:
    if isinstance(form, PackedFormat):
        needs_packed(dtype)
    weight, bias = (tensor.to(dtype) for tensor in (random(96, 128), random(96, seed=1)))
    tolerance = TOLERANCE[dtype] + INT8_STEP * isinstance(form, Int8Format)
    for rows in (1, 3, 5, 33, 80):
        x = random(rows, 128).to(dtype)
        with torch.inference_mode():
            plain, biased = form.linear(weight, None), form.linear(weight, bias)
            gated = form.gated(weight)
            exact = x.double() @ weight.double().T
            assert error(plain(x), exact) < tolerance, rows
            assert error(biased(x), exact + bias.double()) < tolerance, rows
            gate, up = exact.chunk(2, dim=-1)
            assert error(gated(x), torch.nn.functional.silu(gate) * up) < 2 * tolerance, rows


def test_int8_rounds_to_half_a_step() -> None:
    weight = random(50, 70)
    weight[7] = 0
    rounded, scales = quantise(weight)
    assert rounded.dtype == torch.int8
    assert ((rounded * scales[:, None] - weight).abs() <= 0.5001 * scales[:, None]).all()


def test_int8_refuses_what_its_kernel_cannot_read() -> None:
    with pytest.raises(UnsupportedModel, match=r"multiple of 64, this model has one with 72"):
        Int8Format().linear(random(96, 72), None)
    assert Int8Format().linear(random(97, 64), None).nbytes == 97 * 64 * 4
