"""The operations between a decoder layer's matrix products, each in one launch.

A decode of a few rows spends as much time on launching small kernels as on some of the products. On
CUDA these operations are ``triton`` kernels; on the CPU they are loops that numba compiles for
float32. Without either, and for other dtypes, torch's operators do the same in several launches.
"""

from functools import cache
from types import ModuleType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from worker.cpu_kernels.compiled import compiler_problem
from worker.cpu_kernels.team import PARTS, PARTS_PER_THREAD, WORTH_A_TEAM, TeamTask

_BLOCK: Final = 1024
_HEADS: Final = 8


@cache
def _kernels() -> ModuleType | None:
    try:
        from worker.models import fused_kernels
    except ImportError:
        return None
    return fused_kernels


def _kernels_for(x: Tensor) -> ModuleType | None:
    return _kernels() if x.is_cuda else None


def compile_loops() -> None:
    """Compile the CPU's loops, so that no request waits for it. Raises the compiler's errors."""
    loops = _loops()
    for compile_one in (loops.add_norm, loops.rotate, loops.in_turn):
        compile_one()
    for is_short in (False, True):
        loops.convert(is_short)


@cache
def _loops() -> ModuleType:
    from worker.cpu_kernels import step_loops  # imports numba

    return step_loops


def _loops_for(*tensors: Tensor) -> ModuleType | None:
    """The CPU's loops if they support ``tensors``, otherwise None."""
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.dtype == torch.float32 and tensor.is_contiguous()):
            return None
    return _loops() if compiler_problem() is None else None


def row_job(loops: ModuleType, rows: int, **fields: int) -> NDArray[np.int64]:
    """A job of ``step_loops``; ``fields`` are ``RowArguments``."""
    job = np.zeros(loops.SIZE, np.int64)
    job[PARTS], job[loops.AT.rows] = row_parts(rows), rows
    for name, value in fields.items():
        job[getattr(loops.AT, name)] = value
    return job


def row_parts(rows: int) -> int:
    """Number of parts of a job with ``rows`` rows."""
    return min(rows, PARTS_PER_THREAD * torch.get_num_threads())


def bits_of(epsilon: float) -> int:
    return int(np.float64(epsilon).view(np.int64))


def _run(task: TeamTask, job: NDArray[np.int64], values: int) -> None:
    task.run(job, torch.get_num_threads() if values >= WORTH_A_TEAM else 1)


def add_normed_(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``y`` to ``x`` [rows, width] in place; returns the RMS norm of the sum."""
    if (loops := _loops_for(x, y, weight)) is not None:
        rows, width = x.shape
        out, at = torch.empty_like(x), x.data_ptr()
        given = {"x": at, "sums": at, "y": y.data_ptr(), "weight": weight.data_ptr()}
        wanted = {"out": out.data_ptr(), "width": width, "epsilon": bits_of(eps)}
        _run(loops.add_norm(), row_job(loops, rows, **given, **wanted), x.numel())
        return out
    kernels = _kernels_for(x)
    if kernels is None or not (x.is_contiguous() and y.is_contiguous()):
        x += y
        return rms_norm(x, weight.shape, weight, eps)
    return launch_add_norm(kernels, x, y, weight, eps)


def rotate_(heads: Tensor, count: int, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first ``count`` of ``heads`` [tokens, heads, dim] in place; see ``AngleTable`` for
    the tables."""
    if (loops := _loops_for(heads, cos, sin)) is not None:
        tokens, all_heads, dim = heads.shape
        at, tables = heads.data_ptr(), {"y": cos.data_ptr(), "weight": sin.data_ptr()}
        sizes = {"width": dim, "heads": all_heads, "rotated": count}
        _run(loops.rotate(), row_job(loops, tokens, x=at, out=at, **tables, **sizes), heads.numel())
        return
    x = heads[:, :count]
    kernels = _kernels_for(x)
    if kernels is None or x.stride(-1) != 1:
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        x.mul_(cos).addcmul_(swapped, sin)
        return
    launch_rotate(kernels, x, cos, sin)


def gated(both: Tensor) -> Tensor:
    """SiLU of the first half of ``both`` [rows, 2 * width] times the second half: [rows, width]."""
    kernels = _kernels_for(both)
    if kernels is None or not both.is_contiguous():
        gate, up = both.chunk(2, dim=-1)
        return silu(gate) * up
    return launch_gate(kernels, both)


def launch_add_norm(
    kernels: ModuleType, x: Tensor, y: Tensor, weight: Tensor, eps: float
) -> Tensor:
    rows, width = x.shape
    out = torch.empty_like(x)
    padded = 1 << (width - 1).bit_length()
    kernels.add_norm[(rows,)](
        x, y, weight, out, eps, WIDTH=width, PADDED=padded, num_warps=8 if padded >= 2048 else 4
    )
    return out


def launch_rotate(kernels: ModuleType, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    tokens, heads, dim = x.shape
    half = dim // 2
    kernels.rotate[(tokens, -(-heads // _HEADS))](
        x,
        cos,
        sin,
        heads,
        x.stride(0),
        x.stride(1),
        HALF=half,
        PADDED=1 << (half - 1).bit_length(),
        HEADS=_HEADS,
    )


def launch_gate(kernels: ModuleType, both: Tensor) -> Tensor:
    rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty((rows, width))
    kernels.gate[(rows, -(-width // _BLOCK))](both, out, width, BLOCK=_BLOCK)
    return out
