"""Sections ``ceilings`` and ``attention``: what the device can do, which backends work on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from perf.engine.timing import copy_gb_per_s, replayed_ms, timed_ms
from perf.report.rows import Report
from worker.attention import AttentionBackend, KVPool
from worker.attention.choice import TOLERANCE, Trial, error_of, exact, make_trial
from worker.attention.flashinfer_backend import FlashInferAttention, flashinfer_problem
from worker.attention.reference import ReferenceAttention
from worker.attention.triton_backend import TritonAttention

Build = Callable[[KVPool, int, Sequence[int]], AttentionBackend]

BACKENDS: Final[dict[str, Build]] = {
    "triton": lambda pool, heads, windows: TritonAttention(pool, heads, windows=windows),
    "triton invariant": lambda pool, heads, windows: TritonAttention(
        pool, heads, windows=windows, invariant=True
    ),
    "reference": lambda pool, heads, windows: ReferenceAttention(pool, heads, windows=windows),
    # Last, since it may compile for minutes.
    "flashinfer": lambda pool, heads, windows: FlashInferAttention(pool, heads, windows=windows),
}


@dataclass(frozen=True, slots=True)
class _Case:
    """Decodes of so many keys each, then chunks of (new tokens, keys)."""

    name: str
    decodes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...] = ()


_LARGE: Final = (
    _Case("decode 1 x 4096", (4096,)),
    _Case("decode 16 x 2048", (2048,) * 16),
    _Case("decode 64 x 1024", (1024,) * 64),
    _Case("decode 63 x 1024 + 131072", (1024,) * 63 + (131_072,)),
    _Case("decode 31 x 1024 + 131072", (1024,) * 31 + (131_072,)),
    _Case("chunk 512 of 512", (), ((512, 512),)),
    _Case("chunk 512 of 4096", (), ((512, 4096),)),
    _Case("chunk 512 of 65536", (), ((512, 65_536),)),
    _Case("decode 32 x 1024 + chunk 256 of 1024", (1024,) * 32, ((256, 1024),)),
)
_PAGE: Final = 16
_SMALL: Final = (_Case("decode 3 x 40", (40,) * 3), _Case("chunk 20 of 40", (), ((20, 40),)))


def ceilings(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """Measure the device's limits, which everything else is held against."""
    nbytes = 2**20 if tiny else 4 * 2**30
    report.attempt(
        "copy on the device",
        lambda: report.add(
            "copy on the device", copy_gb_per_s(device, nbytes), "GB/s", "read plus written"
        ),
    )
    size = 64 if tiny else 8192

    def multiply() -> None:
        a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
        ms = timed_ms(lambda: a @ b, device)
        report.add(f"bf16 product {size}³", 2 * size**3 / ms / 1e9, "TFLOP/s")

    report.attempt("bf16 product", multiply)


def attention(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """Every backend against float64 on shapes of all kinds, then its speed on large ones."""
    for name, backend in BACKENDS.items():
        if tiny and name != "reference":
            continue  # the others need CUDA, or triton's interpreter
        if name == "flashinfer" and (problem := flashinfer_problem()) is not None:
            report.add(name, "left out", note=problem)
            continue
        report.attempt(
            f"{name}: right",
            lambda n=name, b=backend: _right(report, device, n, b, tiny=tiny),  # type: ignore[misc]
        )
        for case in _SMALL if tiny else _LARGE:
            if name == "flashinfer" and not case.chunks:
                continue  # these are the triton backend's
            what = f"{name}: {case.name}"
            report.attempt(
                what,
                lambda w=what, b=backend, c=case: _fast(  # type: ignore[misc]
                    report, device, w, b, c, tiny=tiny
                ),
            )


def _right(report: Report, device: torch.device, title: str, build: Build, *, tiny: bool) -> None:
    worst: dict[torch.dtype, float] = {}
    wrong, changing, shapes = 0, 0, 0
    rng = np.random.default_rng(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for kv_heads, shared, dim in ((2, 7, 64), (8, 4, 128), (3, 1, 80), (1, 8, 128)):
            if not _takes(title, dtype, dim):
                continue
            longest = 90 if tiny else 900
            pool = _pool(device, dtype, 2, 8 * -(-longest // _PAGE) + 8, kv_heads, dim)
            contexts = rng.integers(1, longest, 4).tolist()
            keys = rng.integers(20, longest, 3).tolist()
            chunks = [(int(rng.integers(1, n + 1)), n) for n in keys]
            trial = make_trial(pool, kv_heads * shared, contexts, chunks, rng)
            windows = (0, int(rng.integers(1, longest)))
            backend = build(pool, kv_heads * shared, windows)
            for layer, window in enumerate(windows):
                expected = exact(pool, layer, trial, window)
                errors = {error_of(backend, layer, trial, expected) for _ in range(3)}
                error = max(errors)
                shapes += 1
                wrong += not error <= TOLERANCE[dtype]
                changing += len(errors) > 1
                worst[dtype] = max(worst.get(dtype, 0.0), error)
    for dtype, error in worst.items():
        name = str(dtype).removeprefix("torch.")
        report.add(f"{title}: largest error, {name}", error, "", "relative to float64")
    verdict = "yes" if not wrong else "NO"
    note = f"{shapes - wrong} of {shapes} shapes; {changing} with another result when repeated"
    report.add(f"{title}: right", verdict, "", note)


def _takes(title: str, dtype: torch.dtype, dim: int) -> bool:
    """Whether a backend is tried on ``dtype`` and heads of ``dim``."""
    if title.startswith("flashinfer"):
        return dtype == torch.bfloat16 and dim == 128  # each other one compiles for minutes
    return True


def _fast(
    report: Report,
    device: torch.device,
    what: str,
    build: Build,
    case: _Case,
    *,
    tiny: bool,
) -> None:
    # More layers than the caches hold.
    layers, kv_heads, shared, dim = (2, 2, 2, 16) if tiny else (6, 8, 4, 128)
    dtype = torch.float32 if tiny else torch.bfloat16
    contexts = [*case.decodes, *(keys for _, keys in case.chunks)]
    blocks = sum(-(-keys // _PAGE) for keys in contexts)
    pool = _pool(device, dtype, layers, blocks, kv_heads, dim)
    trial = make_trial(pool, kv_heads * shared, case.decodes, case.chunks, np.random.default_rng(2))
    step = build(pool, kv_heads * shared, ()).prepare(trial.batch)

    def all_layers() -> None:
        for layer in range(layers):
            step.attend(layer, trial.queries, trial.keys_values)

    layer_us = replayed_ms(all_layers, device) * 1e3 / layers
    read = sum(contexts) * 2 * kv_heads * dim * dtype.itemsize
    report.add(
        what,
        layer_us,
        "µs/layer",
        f"{read / layer_us / 1e3:.0f} GB/s of keys and values, "
        f"{_flops(trial, kv_heads * shared, dim) / layer_us / 1e6:.1f} TFLOP/s",
    )


def _flops(trial: Trial, heads: int, dim: int) -> float:
    queries, keys = trial.batch.query_tokens, trial.batch.context_tokens
    seen = (queries * keys - queries * (queries - 1) // 2).sum()
    return 4.0 * float(seen) * heads * dim


def _pool(
    device: torch.device,
    dtype: torch.dtype,
    layers: int,
    blocks: int,
    kv_heads: int,
    dim: int,
) -> KVPool:
    pool = KVPool(
        layers=layers,
        blocks=blocks,
        block_tokens=_PAGE,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=device,
    )
    pool.data.normal_()
    return pool
