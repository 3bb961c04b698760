"""Chooses the attention backend: by measurement at load, or fixed if results must repeat.

A backend that cannot run here or has wrong results is not a candidate. The trials are logged and
kept, with errors and times.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.fixed import FixedAttention
from worker.attention.flashinfer_backend import FlashInferAttention
from worker.attention.numba_backend import NumbaAttention
from worker.attention.paged import AttentionBackend, KVPool, PackedBatch
from worker.attention.reference import ReferenceAttention
from worker.attention.triton_backend import TritonAttention
from worker.choices import TURNS, KeptChoices, best_of, cpu_seconds, in_turns, one_thread
from worker.log import model_log

TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest ‖out - exact‖ / ‖exact‖ of a correct backend, by dtype: a few rounding errors."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A batch with its queries [tokens, heads, head_dim] and new keys and values."""

    batch: PackedBatch
    queries: Tensor
    keys_values: Tensor


def make_trial(
    pool: KVPool,
    num_heads: int,
    contexts: Sequence[int],
    chunks: Sequence[tuple[int, int]],
    rng: np.random.Generator,
) -> Trial:
    """Make a batch of decodes of ``contexts`` keys each, then ``chunks`` (new tokens, all keys).

    Rows use distinct blocks in random order. Raises ``ValueError`` if the pool is too small.
    """
    blocks_total, page = pool.data.shape[1], pool.block_tokens
    query_tokens = np.array([1] * len(contexts) + [new for new, _ in chunks], np.int64)
    context_tokens = np.array([*contexts, *(keys for _, keys in chunks)], np.int64)
    blocks = -(-context_tokens // page)
    if blocks.sum() > blocks_total:
        raise ValueError(f"the trial needs {blocks.sum()} blocks, the pool has {blocks_total}")
    shuffled = rng.permutation(blocks_total)
    table = np.zeros((len(blocks), int(blocks.max()) + 1), np.int64)
    slots: list[NDArray[np.int64]] = []
    first = 0
    for row, (new, keys, count) in enumerate(
        zip(query_tokens, context_tokens, blocks, strict=True)
    ):
        table[row, :count] = shuffled[first : first + count]
        first += count
        positions = np.arange(keys - new, keys)
        slots.append(table[row, positions // page] * page + positions % page)
    batch = PackedBatch(
        decodes=len(contexts),
        query_tokens=query_tokens,
        context_tokens=context_tokens,
        block_table=table,
        slots=np.concatenate(slots),
    )
    dim, device = pool.data.shape[-1], pool.device
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**31)))
    # Laid out like the output of a fused projection: one token's heads are adjacent.
    heads = torch.randn(
        (len(batch.slots), num_heads + 2 * pool.kv_heads, dim), generator=generator, device=device
    ).to(pool.data.dtype)
    queries, keys_values = heads.tensor_split((num_heads,), dim=1)
    return Trial(batch, queries, keys_values)


def exact(pool: KVPool, layer: int, trial: Trial, window: int = 0) -> Tensor:
    """Compute attention in float64, row by row, after storing the new keys and values.

    → [tokens, heads, head_dim] float64 on the pool's device.
    """
    batch, kv_heads = trial.batch, pool.kv_heads
    data = pool.data[layer]
    data.flatten(0, 1)[torch.from_numpy(batch.slots).to(pool.device)] = trial.keys_values
    results, first = [], 0
    rows = zip(
        batch.query_tokens.tolist(), batch.context_tokens.tolist(), batch.block_table, strict=True
    )
    for new, keys, blocks in rows:
        pages = torch.from_numpy(blocks[: -(-keys // pool.block_tokens)]).to(pool.device)
        stored = data[pages].flatten(0, 1)[:keys].double()
        queries = trial.queries[first : first + new].double()
        shared = queries.shape[1] // kv_heads
        k, v = (half.repeat_interleave(shared, dim=1) for half in stored.chunk(2, dim=1))
        scores = torch.einsum("qhd,khd->hqk", queries, k) / math.sqrt(queries.shape[-1])
        ages = torch.arange(keys - new, keys)[:, None] - torch.arange(keys)
        hidden = (ages < 0) | (ages >= window) if window else ages < 0
        scores.masked_fill_(hidden.to(pool.device), -math.inf)
        results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        first += new
    return torch.cat(results)


def error_of(backend: AttentionBackend, layer: int, trial: Trial, expected: Tensor) -> float:
    """‖out - expected‖ / ‖expected‖ of ``backend``; NaN if its results contain NaN."""
    out = backend.prepare(trial.batch).attend(layer, trial.queries, trial.keys_values)
    return float((out.double() - expected).norm() / expected.norm())


AttentionName = Literal["reference", "numba", "triton", "flashinfer", "fixed"]
AttentionSetting = Literal["auto", "reference", "numba", "triton", "flashinfer"]

_ON_CUDA: Final[tuple[AttentionName, ...]] = ("triton", "flashinfer", "reference")
_ON_CPU: Final[tuple[AttentionName, ...]] = ("numba", "reference")
_ATTENTION: Final = "attention"
_REPEATS: Final = 20
_TRIAL_DECODES: Final = 16
_TRIAL_KEYS: Final = 1024
_TRIAL_CHUNK: Final = 256


@dataclass(frozen=True, slots=True)
class Tried:
    """One backend's trial. ``problem`` says why it is not a candidate; None if it is one.

    ``error`` is relative to float64; ``step_us`` is one layer's attention time for the batch.
    """

    name: AttentionName
    problem: str | None
    error: float = float("nan")
    step_us: float = float("nan")


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backend in use and its trials; ``tried`` is empty if nothing was measured."""

    name: AttentionName
    backend: AttentionBackend
    tried: tuple[Tried, ...] = ()


Timer = Callable[[Callable[[], object], torch.device], float]
"""Measures a call's microseconds on the device."""


def choose_attention(
    setting: AttentionSetting,
    pool: KVPool,
    num_heads: int,
    *,
    windows: Sequence[int] = (),
    deterministic: bool = False,
    timer: Timer | None = None,
    choices: KeptChoices | None = None,
) -> AttentionChoice:
    """Return the backend that ``setting`` names; with ``auto``, the first correct one unless
    another is clearly faster, or on the CPU the one kept in ``choices``, if any.

    With ``deterministic`` nothing is measured: ``auto`` is ``fixed`` on the CPU and ``triton`` on
    CUDA. A row's result must not depend on the batch; the reference and FlashInfer cannot guarantee
    that. The pool must be unused: trials write to it and zero it. Raises ``ValueError`` if the
    requested backend cannot run here, or if none can.
    """
    fixed = _fixed(setting, pool.device.type, deterministic)

    def build(name: AttentionName) -> AttentionBackend:
        return _build(name, pool, num_heads, windows, deterministic)

    if fixed is not None and (deterministic or fixed == "reference"):
        try:
            return AttentionChoice(fixed, build(fixed))
        except Exception as error:  # any error of a compiler or driver
            raise ValueError(_refusal(fixed, _sentence(error))) from error

    on_cpu = pool.device.type == "cpu"
    names = (fixed,) if fixed is not None else _ON_CPU if on_cpu else _ON_CUDA
    choices = choices if choices is not None and fixed is None and on_cpu else KeptChoices()
    for name in names:
        if choices.kept(_ATTENTION, (name,)) is not None:
            with suppress(Exception):  # whatever a compiler raises: it is measured again
                backend = build(name)
                model_log.info("attention runs on %s", name)
                return AttentionChoice(name, backend)
    trial, expected = _trial(pool, num_heads, windows)
    with one_thread():
        limit = TOLERANCE[pool.data.dtype]
        found = [_try(name, build, trial, expected, limit) for name in names]
        timer = timer or (_cpu_us if on_cpu else _time_us)
        steps = {each.name: partial(timer, step, pool.device) for each, step in found if step}
        times_us = in_turns(steps, TURNS if on_cpu else 1)
    tried = tuple(replace(each, step_us=times_us.get(each.name, math.nan)) for each, _ in found)
    pool.data[0, _blocks_of(trial, pool)] = 0.0
    for one in tried:
        result = f": {one.step_us:.0f} µs a layer, error {one.error:.1e}"
        if one.problem is not None:
            result = f" is out: {one.problem}"
        model_log.info("attention backend %s%s", one.name, result)
    sound = [one for one in tried if one.problem is None]
    if not sound:
        raise ValueError("; ".join(_refusal(one.name, one.problem or "") for one in tried))
    best = best_of({one.name: one.step_us for one in sound})
    model_log.info("attention runs on %s", best)
    choices.keep(_ATTENTION, best)
    return AttentionChoice(best, build(best), tried)


def _fixed(
    setting: AttentionSetting, device_type: str, deterministic: bool
) -> AttentionName | None:
    """The backend to use without a measurement, or None if a measurement must decide."""
    if setting in ("reference", "numba", "flashinfer") and deterministic:
        raise ValueError(
            f"deterministic mode cannot use the {setting} attention, whose results depend on the"
            " batch"
        )
    if setting != "auto":
        return setting
    if not deterministic:
        return None
    return "fixed" if device_type == "cpu" else "triton"


def _build(
    name: AttentionName, pool: KVPool, num_heads: int, windows: Sequence[int], deterministic: bool
) -> AttentionBackend:
    if name == "triton":
        return TritonAttention(pool, num_heads, windows=windows, invariant=deterministic)
    kinds: dict[AttentionName, Callable[..., AttentionBackend]] = {
        "reference": ReferenceAttention,
        "numba": NumbaAttention,
        "fixed": FixedAttention,
        "flashinfer": FlashInferAttention,
    }
    return kinds[name](pool, num_heads, windows=windows)


def _blocks_of(trial: Trial, pool: KVPool) -> torch.Tensor:
    return torch.from_numpy(np.unique(trial.batch.block_table)).to(pool.device)


def _trial(pool: KVPool, num_heads: int, windows: Sequence[int]) -> tuple[Trial, torch.Tensor]:
    """Make a typical batch, as large as the pool allows, and its exact result (float64)."""
    blocks = pool.data.shape[1]
    decodes = min(_TRIAL_DECODES, max(1, blocks - 1))
    keys = min(_TRIAL_KEYS, max(1, blocks // (decodes + 1)) * pool.block_tokens)
    chunks = [(min(_TRIAL_CHUNK, keys), keys)] if blocks > 1 else []
    rng = np.random.default_rng(0)
    trial = make_trial(pool, num_heads, [keys] * decodes, chunks, rng)
    # Only the blocks in use: on the CPU, unwritten parts of a pool take no memory.
    used = _blocks_of(trial, pool)
    pool.data[0, used] = torch.randn_like(pool.data[0, used])
    return trial, exact(pool, 0, trial, windows[0] if windows else 0)


def _try(
    name: AttentionName,
    build: Callable[[AttentionName], AttentionBackend],
    trial: Trial,
    expected: Tensor,
    limit: float,
) -> tuple[Tried, Callable[[], object] | None]:
    """Test a backend, without timing it. Returns the trial, and its step if it is a candidate."""
    try:
        backend = build(name)
        error = error_of(backend, 0, trial, expected)
        if not error <= limit:
            wrong = f"its results are off by {error:.1e}, more than {limit:.0e}"
            return Tried(name, wrong, error), None
        step = backend.prepare(trial.batch)
    except Exception as problem:  # any error of a compiler or driver
        return Tried(name, _sentence(problem)), None
    return Tried(name, None, error), lambda: step.attend(0, trial.queries, trial.keys_values)


def _cpu_us(call: Callable[[], object], device: torch.device) -> float:
    return 1e6 * cpu_seconds(call)


def _time_us(call: Callable[[], object], device: torch.device) -> float:
    """Median of several replays of a graph, timed by the device. Launch costs are thus the same for
    all backends and do not count, as in a decode."""
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Another thread of this process may use the device at the same time.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    graph.replay()
    return median(_device_us(graph.replay) for _ in range(_REPEATS))


def _device_us(call: Callable[[], object]) -> float:
    before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    before.record()
    call()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) * 1e3


def _refusal(name: AttentionName, problem: str) -> str:
    return f"attention backend {name!r} cannot be used: {problem}"


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
