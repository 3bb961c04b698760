"""Weights in blocks, against float64; and what a machine without the kernel does."""

import logging

import numpy as np
import pytest
import torch

from tests.worker.models.test_linear import error, random
from worker.cpu_kernels import block_products
from worker.cpu_kernels.block_job import Form
from worker.cpu_kernels.block_products import products_problem, tiles_problem
from worker.models import blocked, loader
from worker.models.blocked import BlockedFormat, DottedLinear, blocks_fit
from worker.models.linear import DenseFormat, PackedFormat, packs
from worker.models.loader import Layout

SHAPES = ((64, 96), (33, 70), (15, 6), (500, 129), (500, 130))

ODD = torch.tensor([-0.0, 3e38, -1e-3, 1 / 3, 65504.0])

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
    if chosen == Form.DOTS:  # where the CPU has no such instruction, two others
        monkeypatch.setattr(blocked, "fastest_form", lambda dtype: Form.DOTS)
    return chosen


def dtype_of(form: Form) -> torch.dtype:
    return torch.float32 if form == Form.FLOAT32 else torch.bfloat16


def rows_for(form: Form, *shape: int) -> torch.Tensor:
    """Such as need not be rounded to bfloat16."""
    return random(*shape, seed=2).to(dtype_of(form)).float()


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_right(form: Form, shape: tuple[int, int]) -> None:
    """Blocks that are not full, odd inputs, several passes over the rows."""
    weight, other = (random(*shape, seed=seed).to(dtype_of(form)) for seed in (0, 1))
    bias = random(shape[0], seed=3)
    for rows in (1, 5, 12, 13, 16, 31, 32, 33, 70):
        x = rows_for(form, rows, shape[1])
        exact = x.double() @ weight.double().T
        gated = torch.nn.functional.silu(exact) * (x.double() @ other.double().T)
        with torch.inference_mode():
            made = BlockedFormat()
            plain = made.linear(weight, None)
            assert plain.form == (Form.FLOAT32 if shape[1] % 2 else form)
            assert isinstance(plain, DottedLinear) is (plain.form == Form.DOTS)
            assert error(plain(x), exact) < 1e-6, rows
            assert error(made.linear(weight, bias)(x), exact + bias.double()) < 1e-6, rows
            assert error(made.gated(torch.cat((weight, other)))(x), gated) < 2e-6, rows


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks share panels by twos; 64 rows are summed at a time."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for name, value in (("MAX_ROUNDED_BYTES", 0), ("PASSES_AT_ONCE", 2), ("BLOCKS_AT_ONCE", 2)):
        monkeypatch.setattr(block_products, f"_{name}", value)


@needs_kernel
@pytest.mark.parametrize("rows", [33, 70, 129])
@pytest.mark.parametrize("outputs", [90, 500])
def test_products_by_panels_are_right(
    form: Form, rows: int, outputs: int, small_caches: None
) -> None:
    inputs = 1_100
    weight, other = (random(outputs, inputs, seed=seed).to(dtype_of(form)) for seed in (0, 1))
    x, bias = rows_for(form, rows, inputs), random(outputs, seed=3)
    exact = x.double() @ weight.double().T
    gated = torch.nn.functional.silu(exact) * (x.double() @ other.double().T)
    made = BlockedFormat()
    assert error(made.linear(weight, bias)(x), exact + bias.double()) < 1e-6
    assert error(made.gated(torch.cat((weight, other)))(x), gated) < 2e-6


@needs_kernel
@pytest.mark.parametrize("caches", ["caches", "small_caches"])
def test_a_row_is_the_same_in_any_company(
    form: Form, caches: str, request: pytest.FixtureRequest
) -> None:
    """To the bit, on any CPU: each sum is made in one order (WK-3)."""
    x = random(70, 600)
    made = BlockedFormat()
    layer, gated = (
        make(random(160, 600, seed=1).to(dtype_of(form))) for make in (plain(made), made.gated)
    )
    if caches == "small_caches":
        request.getfixturevalue(caches)
    for product in (layer, gated):
        together = product(x)
        for rows in (slice(1), slice(3, 15), slice(7, 20), slice(39, 40), slice(2, 60)):
            assert torch.equal(product(x[rows]), together[rows])


@needs_kernel
def test_amx_rounds_rows_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nearest, ties to even; numbers that are none, too large ones and infinities too."""
    if problem := tiles_problem():
        pytest.skip(problem)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    bits = (0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3F808001, 0x7F800000, 0x7F800001, 0x7FFFFFFF)
    odd = np.array([*bits, 0x7FC00000, 0x7F7FFFFF, 0x80000000, 0x00000001], np.uint32)
    values = torch.cat((torch.from_numpy(np.concatenate((odd, odd | 1 << 31)).view("f4")), ODD))
    # A value to a row: an infinity times the zeros of other outputs is no number.
    x = torch.zeros(len(values), 300)
    places = torch.arange(len(values)) * 7 % 300
    x[torch.arange(len(values)), places] = values
    out = BlockedFormat().linear(torch.eye(300, dtype=torch.bfloat16), None)(x)
    found = out[torch.arange(len(values)), places]
    expected = values.bfloat16().float()
    is_tiny = expected.abs() < torch.finfo(torch.float32).tiny  # AMX takes them for zero
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~is_tiny].nan_to_num(7), expected[~is_tiny].nan_to_num(7))


@needs_kernel
def test_dot_products_are_one_instruction_where_the_cpu_has_it() -> None:
    """As LLVM assembles them for such a CPU, whatever this one is."""
    from llvmlite import binding, ir

    from worker.cpu_kernels.block_code import dot
    from worker.cpu_kernels.native import Vectors

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    floats, ints = (ir.VectorType(kind, 16) for kind in (ir.FloatType(), ir.IntType(32)))
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(floats, [ints, ints, floats]), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(dot(Vectors(builder), *function.args, is_native=True))
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu="x86-64-v4", features="+avx512bf16"
    )
    code = machine.emit_assembly(binding.parse_assembly(str(module)))
    (line,) = [line for line in code.splitlines() if "vdpbf16ps" in line]
    assert line.split() == ["vdpbf16ps", "%zmm1,", "%zmm0,", "%zmm2"]


@needs_kernel
@pytest.mark.parametrize("inputs", [70, 600])
@pytest.mark.parametrize("held_up", [False, True])
def test_what_lies_around_does_not_matter(
    form: Form, held_up: bool, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory full of NaNs, and nothing written beyond; and rounding that another thread has begun
    and does not end is done again."""
    made: list[torch.Tensor] = []

    def full(shape: object, dtype: torch.dtype) -> torch.Tensor:
        count = torch.zeros(shape, dtype=dtype).nbytes  # type: ignore[arg-type]
        room = torch.full((count + 128,), 0xFF, dtype=torch.uint8)
        made.append(room)
        return room[64 : 64 + count].view(dtype).view(shape)  # type: ignore[arg-type]

    x, weight = rows_for(form, 37, inputs), random(50, inputs, seed=1).to(dtype_of(form))
    layer = BlockedFormat().linear(weight, None)
    if held_up:
        monkeypatch.setattr(block_products, "_NONE_BEGUN", 3)
    monkeypatch.setattr(block_products, "empty", full)
    assert error(layer(x), x.double() @ weight.double().T) < 1e-6
    assert len(made) == (2 if form == Form.TILES else 1)
    for room in made:
        assert (room[:64] == 0xFF).all()
        assert (room[-64:] == 0xFF).all()


def plain(form: BlockedFormat):  # type: ignore[no-untyped-def]
    return lambda weight: form.linear(weight, None)


@needs_kernel
def test_extremes_and_missing_numbers_pass_through(form: Form) -> None:
    weight = torch.eye(16, dtype=dtype_of(form))
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([1e4, -1e4, torch.nan, 3.0])
    out = BlockedFormat().gated(torch.cat((weight, torch.ones_like(weight))))(x.nan_to_num(0.0))
    assert out[0, 0] > 0
    assert abs(out[0, 1]) < 1e-30
    assert BlockedFormat().gated(torch.cat((weight, weight)))(x).isnan().any()


@needs_kernel
def test_without_permission_amx_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {"avx2", "fma", "amx-tile", "amx-bf16"}
    monkeypatch.setattr(block_products, "cpu_features", lambda: features)
    monkeypatch.setattr(block_products, "may_use_amx", lambda: True)
    assert block_products.fastest_form(torch.bfloat16) == Form.TILES
    assert BlockedFormat().tile_rows == 16
    assert block_products.fastest_form(torch.float32) == Form.FLOAT32
    monkeypatch.setattr(block_products, "may_use_amx", lambda: False)
    assert BlockedFormat().tile_rows == 1
    assert tiles_problem() == "the system does not let this process use AMX"
    assert block_products.fastest_form(torch.bfloat16) == Form.BFLOAT16
    monkeypatch.setattr(block_products, "may_use_amx", lambda: True)
    features.discard("amx-bf16")
    assert tiles_problem() == "the CPU has no AMX for bfloat16"
    assert block_products.fastest_form(torch.bfloat16) == Form.BFLOAT16


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
        found = loader._format(Layout(), torch.bfloat16, {})
    assert isinstance(found, PackedFormat if packs(torch.bfloat16) else DenseFormat)
    assert "CPU loops are not compiled" not in caplog.text, "all else stays compiled"
    assert "matrix products are left to oneDNN or BLAS: " in caplog.text
