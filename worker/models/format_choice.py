"""Chooses the layout of a model's linear layers on the CPU: each is timed when the worker loads.

Which is fastest depends on the CPU: blocks of our own on most, oneDNN's layers on some.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

from worker.log import model_log
from worker.models.linear import Format, Linear

TRIAL_ROWS: Final = (1, 8, 32, 256)
"""Rows of the trials: one text, several, and a prompt's chunk. All count alike."""
CLEARLY: Final = 0.95
"""Share of the first layout's time below which another takes its place: less is chance."""
_ROUNDS: Final = 3
_MATRIX_ELEMENTS: Final = 1 << 22
_BEYOND_CACHE_BYTES: Final = 1 << 26
"""Most bytes of weights that are used in turn, so that each comes from where it comes from in a
model's step."""
_MAX_MATRICES: Final = 16
_CHUNK_ROWS: Final = 64
"""Rows from which a product is arithmetic: one matrix says enough."""

Timer = Callable[[Callable[[], object]], float]
"""Measures a call, in seconds."""


def fastest_format(
    formats: Mapping[str, Format],
    shape: tuple[int, int],
    dtype: torch.dtype,
    model_bytes: int = _BEYOND_CACHE_BYTES,
    timer: Timer | None = None,
) -> Format:
    """The fastest of ``formats``, by name, for weights [outputs, inputs] like those of ``shape`` in
    a model of ``model_bytes``.

    Times are compared by their geometric mean over ``TRIAL_ROWS``. The first is kept unless another
    is clearly faster. Takes up to half a second, and up to 128 MiB that are given back.
    """
    first = next(iter(formats))
    if len(formats) == 1:
        return formats[first]
    times = _times(formats, shape, dtype, model_bytes, timer or _seconds)
    ratios = {name: _ratio(each, times[first]) for name, each in times.items()}
    best = min(ratios, key=lambda name: ratios[name])
    chosen = best if ratios[best] < CLEARLY else first
    figures = [
        f"{name} takes {ratios[name]:.2f} times as long as {first}"
        f" ({', '.join(_figure(*one) for one in zip(TRIAL_ROWS, each, strict=True))})"
        for name, each in times.items()
    ]
    model_log.info("matrix products by %s: %s", chosen, "; ".join(figures))
    return formats[chosen]


def _figure(rows: int, seconds: float) -> str:
    return f"{rows} rows {1000 * seconds:.2f} ms"


def _times(
    formats: Mapping[str, Format],
    shape: tuple[int, int],
    dtype: torch.dtype,
    model_bytes: int,
    timer: Timer,
) -> dict[str, list[float]]:
    """The least seconds of one product by each format, for each of ``TRIAL_ROWS``."""
    inputs = shape[1]
    outputs = max(1, min(shape[0], _MATRIX_ELEMENTS // inputs))
    weight = torch.randn(outputs, inputs).div_(math.sqrt(inputs)).to(dtype)
    turn_bytes = min(model_bytes, _BEYOND_CACHE_BYTES)
    count = min(max(1, turn_bytes // weight.nbytes), _MAX_MATRICES)
    layers = {
        name: [each.linear([weight], None) for _ in range(count)] for name, each in formats.items()
    }
    found = {name: [math.inf] * len(TRIAL_ROWS) for name in formats}
    for _ in range(_ROUNDS):  # by turns: a busy moment falls on all
        for at, rows in enumerate(TRIAL_ROWS):
            for name, each in formats.items():
                used = layers[name] if rows < _CHUNK_ROWS else layers[name][:1]
                x = torch.randn(rows, inputs).to(each.rows_dtype or dtype)
                took_s = timer(lambda used=used, x=x: _use(used, x)) / len(used)  # type: ignore[misc]
                found[name][at] = min(found[name][at], took_s)
    return found


def _use(layers: list[Linear], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


def _ratio(times: list[float], beside: list[float]) -> float:
    """The geometric mean of how many times as long ``times`` are."""
    logs = [math.log(one / other) for one, other in zip(times, beside, strict=True)]
    return math.exp(sum(logs) / len(logs))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
