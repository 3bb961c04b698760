"""Loads a checkpoint's weights as a model's parameters; fuses and packs them on the way.

::

    CPU    read (several threads) ─▶ staging, one parameter each ─▶ blocks | packed | turned |
                                                                            dense
    CUDA   read (several threads) ─▶ pinned ring ─▶ side stream ─▶ fused tensors   (cuda_loader)

The largest parameters are loaded first, one at a time, while little else is in memory; the others
follow layer by layer. The peak is the weights plus about one layer. On the CPU, the embedding is
always memory-mapped, because a step reads only a few of its rows.

On the CPU, measured CPU time selects the layout of linear layers: the fastest depends on the CPU.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import geometric_mean
from typing import Final

import torch
from torch import Tensor

from worker.choices import KeptChoices, best_of, cpu_seconds, in_turns, one_thread
from worker.cpu_kernels.block_job import Form
from worker.cpu_kernels.block_products import fastest_form
from worker.cpu_kernels.compiled import has_dots
from worker.log import model_log
from worker.models.blocked import BlockedFormat, blocks_fit
from worker.models.checkpoint import Checkpoint
from worker.models.cuda_loader import load_on_cuda
from worker.models.linear import (
    DenseFormat,
    Format,
    Linear,
    PackedFormat,
    TurnedFormat,
    packs,
)
from worker.models.malloc import returning_large_blocks
from worker.models.parameters import Kind, Parameter, StoredPart, stacked_shape

_PRODUCTS: Final = "matrix products"
TRIAL_ROWS: Final = (1, 8, 32, 256)
"""Rows of the trials: one text, several texts, and a prompt chunk. All have equal weight."""
_MATRIX_ELEMENTS: Final = 1 << 22
_BEYOND_CACHE_BYTES: Final = 1 << 26
"""Maximum bytes of weights that a trial cycles through, so that each weight comes from the same
cache level or memory as in a model's step."""
_MAX_MATRICES: Final = 16
_CHUNK_ROWS: Final = 64
"""Number of rows from which arithmetic dominates a product: timing one matrix is enough."""

Timer = Callable[[Callable[[], object]], float]
"""Measures a call's time in seconds."""


def fastest_format(
    formats: Mapping[str, Format],
    shape: tuple[int, int],
    dtype: torch.dtype,
    model_bytes: int = _BEYOND_CACHE_BYTES,
    timer: Timer | None = None,
    choices: KeptChoices | None = None,
) -> Format:
    """The name of the fastest of ``formats`` for weights [outputs, inputs] of ``shape`` in a model
    of ``model_bytes``.

    Returns the choice kept in ``choices``, if any. Otherwise compares the geometric means of CPU
    times over ``TRIAL_ROWS`` and keeps the first unless another is clearly faster. That takes a few
    seconds and up to 128 MiB, which are freed.
    """
    first = next(iter(formats))
    if len(formats) == 1:
        return formats[first]
    choices = choices or KeptChoices()
    if (kept := choices.kept(_PRODUCTS, formats)) is not None:
        return formats[kept]
    with one_thread():
        times = _times(formats, shape, dtype, model_bytes, timer or cpu_seconds)
    ratios = {
        name: geometric_mean(map(truediv, each, times[first])) for name, each in times.items()
    }
    chosen = best_of(ratios)
    figures = []
    for name, each in times.items():
        rows = zip(TRIAL_ROWS, each, strict=True)
        shown = ", ".join(f"{count} rows {1000 * seconds:.2f} ms" for count, seconds in rows)
        figures.append(f"{name} takes {ratios[name]:.2f} times as long as {first} ({shown})")
    model_log.info("%s by %s: %s", _PRODUCTS, chosen, "; ".join(figures))
    choices.keep(_PRODUCTS, chosen)
    return formats[chosen]


def _times(
    formats: Mapping[str, Format],
    shape: tuple[int, int],
    dtype: torch.dtype,
    model_bytes: int,
    timer: Timer,
) -> dict[str, list[float]]:
    """Seconds of one product in each format, for each of ``TRIAL_ROWS``."""
    inputs = shape[1]
    outputs = max(1, min(shape[0], _MATRIX_ELEMENTS // inputs))
    weight = torch.randn(outputs, inputs).div_(math.sqrt(inputs)).to(dtype)
    turn_bytes = min(model_bytes, _BEYOND_CACHE_BYTES)
    count = min(max(1, turn_bytes // weight.nbytes), _MAX_MATRICES)
    layers = {
        name: [each.linear(weight, None) for _ in range(count)] for name, each in formats.items()
    }

    def sample(name: str, rows: int) -> float:
        used = layers[name] if rows < _CHUNK_ROWS else layers[name][:1]
        x = torch.randn(rows, inputs).to(formats[name].rows_dtype or dtype)
        return timer(lambda: _use(used, x)) / len(used)

    found = in_turns(
        {(rows, name): partial(sample, name, rows) for rows in TRIAL_ROWS for name in formats}
    )
    return {name: [found[rows, name] for rows in TRIAL_ROWS] for name in formats}


def _use(layers: list[Linear], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


_READERS: Final = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of weights on the CPU.

    ``small``: the caches hold much of the weights, so call overhead matters. ``measured``: use the
    layout with the fastest products here, kept in ``choices``; otherwise the first layout that the
    CPU supports.
    """

    small: bool = False
    measured: bool = False
    choices: KeptChoices = field(default_factory=KeptChoices)


@dataclass(frozen=True, slots=True)
class Weights:
    """Loaded parameters by name.

    ``dtype`` applies to the linear layers and the KV pool, ``rows_dtype`` to everything else.
    """

    form: Format
    dtype: torch.dtype
    tensors: dict[str, Tensor] = field(default_factory=dict)
    linears: dict[str, Linear] = field(default_factory=dict)

    @property
    def rows_dtype(self) -> torch.dtype:
        return self.form.rows_dtype or self.dtype

    def add(
        self,
        name: str,
        parameter: Parameter,
        read: Callable[[tuple[StoredPart, ...], torch.dtype], Tensor],
    ) -> None:
        """Add a parameter from its parts, which ``read`` returns stacked."""
        match parameter.kind:
            case Kind.LINEAR:
                bias = read(parameter.bias, self.rows_dtype) if parameter.bias else None
                weight = read(parameter.parts, self.dtype)
                self.linears[name] = self.form.linear(weight, bias)
            case Kind.GATED:
                self.linears[name] = self.form.gated(read(parameter.parts, self.dtype))
            case Kind.TENSOR | Kind.EMBEDDING:
                self.tensors[name] = read(parameter.parts, self.rows_dtype)

    @property
    def step_bytes(self) -> int:
        """Minimum bytes that a step reads: everything except the rows of the embedding."""
        norms = sum(t.nbytes for name, t in self.tensors.items() if name != "embedding")
        return norms + sum(layer.nbytes for layer in self.linears.values())


def load_weights(
    path: Path,
    parameters: Mapping[str, Parameter],
    dtype: torch.dtype,
    device: torch.device,
    *,
    layout: Layout | None = None,
    unused: Iterable[str] = (),
) -> Weights:
    """Read ``parameters`` of checkpoint directory ``path`` onto ``device``.

    The files may contain the ``unused`` tensors, which are not read. Raises ``CheckpointError``,
    before reading any weight if files and configuration do not match.
    """
    layout = layout or Layout()
    with Checkpoint(path) as checkpoint, torch.inference_mode():
        checkpoint.check_fit(parameters.values(), unused)
        if device.type == "cuda":
            loaded = load_on_cuda(checkpoint, parameters, dtype, device)
            weights = Weights(DenseFormat(), dtype)
            for name, parameter in parameters.items():
                weights.add(name, parameter, lambda parts, _: loaded[parts])
            return weights
        with returning_large_blocks():
            form = _format(layout, dtype, parameters)
            return _CPULoader(checkpoint, Weights(form, dtype)).load(parameters)


def _format(layout: Layout, dtype: torch.dtype, parameters: Mapping[str, Parameter]) -> Format:
    if layout.small and dtype == torch.float32:
        # oneDNN's calls cost 15 to 20 µs more than plain calls, with no gain. Blocks take 0.6 to
        # 1.25 times as long, depending on the number of rows, and about as long on average (one
        # Intel CPU with AVX-512).
        return TurnedFormat()
    formats: dict[str, Format] = {}
    if blocks_fit(dtype):
        formats["blocks"] = BlockedFormat()
        if fastest_form(dtype) == Form.BFLOAT16 and has_dots():
            formats["blocks by vdpbf16ps"] = BlockedFormat(Form.DOTS)
    if packs(dtype) and not (layout.small and formats):
        formats["oneDNN"] = PackedFormat()
    if not formats:
        model_log.warning("oneDNN has no packed %s layers on this CPU; they stay unpacked", dtype)
        return DenseFormat()
    if not layout.measured:
        return next(iter(formats.values()))
    products = [
        parameter
        for name, parameter in parameters.items()
        if name.startswith("layers.0.") and parameter.kind in (Kind.LINEAR, Kind.GATED)
    ]
    outputs, inputs = max(products, key=lambda one: one.elements).shape
    read = [each for each in parameters.values() if each.kind is not Kind.EMBEDDING]
    model_bytes = sum(each.elements for each in read) * dtype.itemsize
    shape = outputs, inputs
    return fastest_format(formats, shape, dtype, model_bytes, choices=layout.choices)


class _CPULoader:
    """Reads, converts and packs parameters, one at a time per thread."""

    def __init__(self, checkpoint: Checkpoint, weights: Weights) -> None:
        self._checkpoint = checkpoint
        self._weights = weights

    def load(self, parameters: Mapping[str, Parameter]) -> Weights:
        layer = sum(p.elements for name, p in parameters.items() if name.startswith("layers.0."))
        by_size = sorted(parameters.items(), key=lambda item: -item[1].elements)
        large = {name: p for name, p in by_size if p.elements > layer}
        for name, parameter in large.items():
            self._load_one(name, parameter)
        rest = [(name, p) for name, p in parameters.items() if name not in large]
        with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), "tidegate-load") as pool:
            for _ in pool.map(lambda item: self._load_one(*item), rest):
                pass
        return self._weights

    @torch.inference_mode()  # inference mode is per thread
    def _load_one(self, name: str, parameter: Parameter) -> None:
        if parameter.kind is Kind.EMBEDDING:
            self._weights.tensors[name] = self._checkpoint.mapped(parameter.parts[0])
        else:
            self._weights.add(name, parameter, self._read)

    def _read(self, parts: tuple[StoredPart, ...], dtype: torch.dtype) -> Tensor:
        """Read ``parts`` stacked and converted to ``dtype``, in fresh memory."""
        stacked = torch.empty(stacked_shape(parts), dtype=dtype)
        first = 0
        for part in parts:
            rows = stacked[first : first + part.shape[0]]
            first += part.shape[0]
            stored = self._checkpoint[part]
            if stored.dtype == stacked.dtype:
                self._checkpoint.read_into(part, rows)
            else:
                raw = torch.empty(part.shape, dtype=stored.dtype)
                self._checkpoint.read_into(part, raw)
                rows.copy_(raw)
        return stacked
