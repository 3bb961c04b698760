"""Multiplies rows by weights in blocks, compiled by numba for CPUs with AVX2, AVX-512 or AMX.

A step of few rows takes as long as reading its weights. They are stored in order of use, and read
once::

    weights  [outputs / 32][inputs / 2][32 outputs][2]   bfloat16, pairs of adjacent inputs
             [outputs / 32][inputs]    [32 outputs]      float32
    gated    the same; a block has 16 of the gate's outputs and then 16 of the other's

With AVX-512, sums of 32 outputs and up to 12 rows stay in registers; with AVX2, up to 3 rows.
bfloat16 is widened to float32 (a shift, a mask) and summed by plain multiply-adds: on Intel
(Emerald Rapids) that is 1.7 times as fast as its bfloat16 instruction, which gives a result every
other cycle. On other CPUs (AMD, from Zen 4 on), the worker uses that instruction on the same
blocks, with rows rounded to bfloat16, if it measures at load that it is faster.

With AMX, rows are first rounded to bfloat16, and sums of up to 32 rows stay in registers. With more
rows arithmetic dominates, and memory must not be read again for every 32 rows: a panel (some turns
of a block) is computed for 512 rows, and the sums go to memory and back for the next panel. If the
rows exceed the L2 cache, up to 7 blocks are computed before the next panel, so that some inputs of
all rows stay there. Each sum runs over the inputs in order, for any number of rows.
"""

import ctypes
from functools import cache
from typing import Final

import torch
from torch import Tensor, empty

from worker.cpu_kernels.block_job import PANEL_TURNS, Form, ProductArguments
from worker.cpu_kernels.compiled import compiler_problem, cpu_features
from worker.cpu_kernels.team import FIRST_ARGUMENT, PARTS_PER_THREAD, has_team

_FEWEST_PARTS: Final = 2
"""Minimum parts per thread if blocks share panels; each thread then gets the same number."""
_NONE_BEGUN: Final = 0
TILE_ROWS: Final = 16
"""Rows per AMX tile."""
_TILE_BYTES: Final = 1024
PASS_ROWS: Final = 32
_PASSES_AT_ONCE: Final = 16
"""Maximum number of consecutive passes through a panel; their sums for a block take 64 KiB."""
_BLOCKS_AT_ONCE: Final = 7
"""Maximum number of blocks computed for one panel before the next panel."""
_MAX_ROUNDED_BYTES: Final = 1 << 20
"""Maximum bytes of rounded rows before blocks share panels: more would be reloaded from beyond the
L2 cache for each block."""


_Job = ctypes.c_int64 * (FIRST_ARGUMENT + len(ProductArguments._fields))


def products_problem() -> str | None:
    """Why this machine does not support these products; None if it does."""
    if (problem := compiler_problem()) is not None:
        return problem
    if not {"avx2", "fma"} <= cpu_features():
        return "the CPU has no AVX2"
    if not has_team():
        return "torch's OpenMP is out of reach"
    return None


@cache
def may_use_amx() -> bool:
    """Whether the CPU has AMX and the system allows its use; asks Linux for permission."""
    return bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())


def tiles_problem() -> str | None:
    """Why products cannot use AMX, given that ``products_problem`` is None; None if they can."""
    if not {"amx-tile", "amx-bf16"} <= cpu_features():
        return "the CPU has no AMX for bfloat16"
    if not may_use_amx():
        return "the system does not let this process use AMX"
    return None


def fastest_form(dtype: torch.dtype) -> Form:
    """The fastest form here for weights of ``dtype``, bfloat16 or float32."""
    if dtype == torch.float32:
        return Form.FLOAT32
    has_tiles = products_problem() is None and tiles_problem() is None
    return Form.TILES if has_tiles else Form.BFLOAT16


def blocks_of(outputs: int, *, is_gated: bool) -> int:
    return -(-outputs // (16 if is_gated else 32))


def parts_of(blocks: int, threads: int) -> int:
    """Number of parts into which ``blocks`` are divided if they do not share panels."""
    return -(-blocks // max(1, blocks // (threads * PARTS_PER_THREAD)))


class Product:
    """Computes rows · weightsᵀ + bias; gated: SiLU of the first product times the second."""

    def __init__(self, form: Form, *, is_gated: bool) -> None:
        """Compile the product."""
        from worker.cpu_kernels.block_loops import multiply

        self.task = multiply(int(form), is_gated)
        self._form = form
        self._is_gated = is_gated

    def __call__(self, weights: int, x: Tensor, bias: int, outputs: int) -> Tensor:
        """Multiply ``x`` [rows, inputs] float32 → [rows, outputs] float32. Releases the GIL.

        ``weights`` and ``bias`` are addresses, see ``ProductArguments``.
        """
        count, inputs = x.shape
        x = x.contiguous()
        results = empty((count, outputs), dtype=torch.float32)
        turns = -(-inputs // self._form.inputs_per_turn)
        rounded = 0
        if self._form == Form.DOTS:
            x = x.to(torch.bfloat16)
        if self._form == Form.TILES:
            tiles = -(-count // TILE_ROWS) * turns
            room = empty(tiles * _TILE_BYTES, dtype=torch.uint8)
            rounded = room.data_ptr()
        threads = torch.get_num_threads()
        blocks = blocks_of(outputs, is_gated=self._is_gated)
        parts = parts_of(blocks, threads)
        panels, passes_at_once, blocks_at_once = 1, 1, 1
        if self._form == Form.TILES and count > PASS_ROWS:
            panels = -(-turns // PANEL_TURNS)
            passes = -(-count // PASS_ROWS)
            passes_at_once = -(-passes // -(-passes // _PASSES_AT_ONCE))
            if room.nbytes > _MAX_ROUNDED_BYTES and blocks >= 2 * _FEWEST_PARTS * threads:
                parts = threads * max(_FEWEST_PARTS, -(-blocks // (_BLOCKS_AT_ONCE * threads)))
                blocks_at_once = -(-blocks // parts)
        job = _Job(
            *(0, parts, 0, 0, 0),
            *ProductArguments(
                *(weights, x.data_ptr(), rounded, _NONE_BEGUN, 0, bias, results.data_ptr()),
                *(count, inputs, outputs, turns),
                *(panels, passes_at_once, blocks_at_once),
            ),
        )
        self.task.run_at(ctypes.addressof(job), threads)
        return results


@cache
def product(form: Form, *, is_gated: bool) -> Product:
    """The product for ``form``, compiled once."""
    return Product(form, is_gated=is_gated)
