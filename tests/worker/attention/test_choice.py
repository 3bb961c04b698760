"""Choice by measurement: what is wrong or cannot run is out, the fastest of the rest is in."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch

from tests.support.attention_cases import pool_of, random_case
from worker.attention import AttentionStep, KVPool, PackedBatch, choice
from worker.attention.choice import AttentionName, choose_attention
from worker.attention.reference import ReferenceAttention
from worker.choices import KeptChoices
from worker.runner.memory import ProcessMemory


@pytest.fixture
def pool() -> KVPool:
    pool = random_case(1, torch.float32, torch.device("cpu")).pool
    pool.data.zero_()
    return pool


class Wrong:
    """Right but for the last token."""

    def __init__(self, pool: KVPool, heads: int) -> None:
        self._sound = ReferenceAttention(pool, heads)

    def prepare(self, batch: PackedBatch) -> AttentionStep:
        step = self._sound.prepare(batch)

        class WrongStep:
            def attend(self, *args: object) -> torch.Tensor:
                out = step.attend(*args)  # type: ignore[arg-type]
                out[-1] = 0
                return out

        return WrongStep()


def choose_among(
    monkeypatch: pytest.MonkeyPatch,
    pool: KVPool,
    kinds: dict[AttentionName, Callable[[KVPool, int], object]],
    times_us: dict[str, float],
) -> choice.AttentionChoice:
    """As on CUDA, with other builders and a timer that knows the backend by its step."""

    turns = cycle(each for name, each in times_us.items() if kinds[name] is ReferenceAttention)  # type: ignore[index]
    heads = pool.kv_heads * 2
    monkeypatch.setattr(choice, "_build", lambda name, *args: kinds[name](pool, heads))
    monkeypatch.setattr(choice, "_fixed", lambda *args: None)
    monkeypatch.setattr(choice, "_ON_CPU", choice._ON_CUDA)
    return choose_attention("auto", pool, heads, timer=lambda call, device: next(turns))


def no_compiler(pool: KVPool, heads: int) -> object:
    raise RuntimeError("no compiler\nmore")


@pytest.mark.parametrize(("us", "name"), [(9, "triton"), (4.9, "triton"), (4, "reference")])
def test_the_first_sound_backend_stays_unless_another_is_clearly_faster(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch, us: float, name: str
) -> None:
    kinds = {"triton": ReferenceAttention, "flashinfer": Wrong, "reference": ReferenceAttention}
    times = {"triton": 5.0, "flashinfer": 1.0, "reference": us}
    chosen = choose_among(monkeypatch, pool, kinds, times)  # type: ignore[arg-type]
    assert chosen.name == name
    tried = {one.name: one for one in chosen.tried}
    assert "off by" in (tried["flashinfer"].problem or "")
    assert tried["triton"].problem is None and tried["triton"].step_us == 5.0
    assert tried["triton"].error < 1e-5
    assert not pool.data.any(), "a trial left something in the pool"


def test_a_backend_that_cannot_run_is_out(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    others = ("triton", "flashinfer")
    kinds = {**dict.fromkeys(others, no_compiler), "reference": ReferenceAttention}
    chosen = choose_among(monkeypatch, pool, kinds, {"reference": 9.0})  # type: ignore[arg-type]
    assert chosen.name == "reference"
    assert chosen.tried[0].problem == "RuntimeError: no compiler"


def test_none_that_is_sound(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = dict.fromkeys(("triton", "flashinfer", "reference"), Wrong)
    with pytest.raises(
        ValueError, match=r"'triton' cannot be used: its results are off.*flashinfer"
    ):
        choose_among(monkeypatch, pool, kinds, {})  # type: ignore[arg-type]


def test_auto_on_the_cpu_measures_what_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # A shape that test_numba.py compiles as well.
    pool = pool_of(40, 1, 8, dtype=torch.bfloat16)

    def chosen() -> choice.AttentionChoice:
        return choose_attention("auto", pool, 10, timer=lambda call, device: 5.0)

    assert [one.problem for one in chosen().tried] == [None, None]
    monkeypatch.setattr("worker.attention.numba_backend.compiler_problem", lambda: "no numba here")
    without = chosen()
    assert without.name == "reference"
    assert "no numba here" in (without.tried[0].problem or "")
    fixed = choose_attention("auto", pool, 10, deterministic=True)
    assert fixed.name == "fixed" and not fixed.tried


def test_on_the_cpu_a_choice_is_kept(
    pool: KVPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose() -> choice.AttentionChoice:
        return choose_attention("auto", pool, pool.kv_heads, choices=KeptChoices(tmp_path))

    first = choose()
    monkeypatch.setattr(choice, "_try", lambda *args: pytest.fail("measured"))
    assert choose().name == first.name and first.tried and not pool.data.any()


def test_deterministic_mode_measures_nothing(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """WK-3: one fixed backend."""
    monkeypatch.setattr(choice, "_try", lambda *args: pytest.fail("measured"))
    assert choose_attention("auto", pool, 4, deterministic=True).name == "fixed"
    with pytest.raises(ValueError, match="depend on the batch"):
        choose_attention("reference", pool, 4, deterministic=True)
    assert choice._fixed("auto", "cuda", True) == "triton"
    assert choice._fixed("auto", "cuda", False) is None


def test_a_named_backend_that_cannot_run_is_refused(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "FlashInferAttention", lambda *args, windows: no_compiler(*args))
    with pytest.raises(ValueError, match=r"'flashinfer' cannot be used: .*no compiler"):
        choose_attention("flashinfer", pool, pool.kv_heads)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measured_on_cuda() -> None:
    pool = random_case(1, torch.bfloat16, torch.device("cuda"), longest=2000).pool
    chosen = choose_attention("auto", pool, pool.kv_heads * 2)
    tried = {one.name for one in chosen.tried}
    assert tried == {"triton", "flashinfer", "reference"}


MIB = 2**20


def test_a_pool_on_the_cpu_takes_memory_only_as_it_fills() -> None:
    """Also once the attention was chosen, which tries the candidates on it."""
    # A shape that test_numba.py compiles as well.
    dtype, heads, kv_heads, dim = torch.bfloat16, 10, 1, 8
    meter = ProcessMemory()
    before = meter.used_bytes()
    blocks = 2**29 // (4 * 16 * 2 * kv_heads * dim * dtype.itemsize)
    pool = pool_of(blocks, kv_heads, dim, layers=4, dtype=dtype)
    assert pool.data.nbytes == 512 * MIB
    assert pool.data.data_ptr() % 64 == 0
    choose_attention("reference", pool, heads)
    choose_attention("auto", pool, heads, timer=lambda call, device: (call(), 1.0)[1])
    assert meter.used_bytes() - before < 200 * MIB
    assert not pool.data[:, ::97].any()
    pool.data[-1, -1] = 1.0
    assert pool.data[-1, -1].eq(1).all() and not pool.data[-1, -2].any()
