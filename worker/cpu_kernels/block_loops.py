"""The compiled loops of ``block_products``. Import this module only if numba is installed.

The code is in the module's globals: numba's cache treats closures as constants, which would be new
in every process.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np

from worker.cpu_kernels import amx_code, block_code
from worker.cpu_kernels.amx_code import LINES, TURN_INPUTS
from worker.cpu_kernels.amx_code import MAX_ROWS as PASS_ROWS
from worker.cpu_kernels.block_code import (
    BLOCK_OUTPUTS,
    CACHE_LINE,
    aligned,
    begin,
    block_sums,
    end,
    finish,
    rounded,
)
from worker.cpu_kernels.block_job import AT, PANEL_TURNS, Form
from worker.cpu_kernels.native import (
    LOOKS,
    array_at,
    carray,
    float32,
    int64,
    jitable,
    look_at,
    parts_of,
    pause,
    take,
)
from worker.cpu_kernels.team import FIRST_ARGUMENT, PARTS, TeamTask, compiled_task

_SOURCE: Final = Path(__file__).read_bytes()
_AHEAD_BYTES: Final = 4096
_ROUNDED_AT_ONCE: Final = 4
"""Number of rows that a thread rounds at a time."""
_LINE_BYTES: Final = 2 * TURN_INPUTS
_SUM_BYTES: Final = 4 * BLOCK_OUTPUTS
"""Bytes of the sums for one row and one block."""


@jitable
def _round_rows(job: Any) -> None:
    """Write ``job``'s rows in AMX's layout, see ``ProductArguments.rounded``.

    Each thread rounds a few rows; then all wait for the last thread, or redo all rows with the same
    result, because another process may hold the late thread's core for long.
    """
    count, inputs, turns = job[AT.row_count], job[AT.inputs], job[AT.turns]
    whole = inputs // TURN_INPUTS
    exact = array_at(job[AT.rows], float32, (count, inputs))
    last_line = np.zeros(TURN_INPUTS, np.float32)
    begun, done = job.ctypes.data + 8 * AT.rounding, job.ctypes.data + 8 * AT.rounded_shares
    shares = (count + _ROUNDED_AT_ONCE - 1) // _ROUNDED_AT_ONCE
    share, is_again = take(begun), False
    while share < shares or not is_again:
        if share >= shares:
            for _ in range(LOOKS):
                if look_at(done) >= shares:
                    return
                pause()
            share, is_again = 0, True
        first = share * _ROUNDED_AT_ONCE
        for row in range(first, min(count, first + _ROUNDED_AT_ONCE)):
            line = job[AT.rows] + 4 * row * inputs
            tile = row // LINES * turns * LINES + row % LINES
            into = job[AT.rounded] + tile * _LINE_BYTES
            for _ in range(whole):
                rounded(line, into)
                line += 4 * TURN_INPUTS
                into += LINES * _LINE_BYTES
            if whole < turns:
                for i in range(inputs - whole * TURN_INPUTS):
                    last_line[i] = exact[row, whole * TURN_INPUTS + i]
                rounded(last_line.ctypes.data, into)
        if is_again:
            share += 1
        else:
            take(done)
            share = take(begun)


@jitable
def _bounds(number: Any, passes: Any, count: Any, is_tiled: Any) -> Any:
    """First row and end of a pass: rows are divided evenly, but only the last tile is partial."""
    if is_tiled:
        return number * PASS_ROWS, min(count, (number + 1) * PASS_ROWS)
    return count * number // passes, count * (number + 1) // passes


@jitable
def _finish_block(
    job: Any, block: Any, first: Any, last: Any, sums: Any, width: Any, is_gated: Any
) -> None:
    """Write the results of rows ``first`` to ``last`` (exclusive) from a block's ``sums``."""
    outputs, output, bias = job[AT.outputs], block * width, job[AT.bias]
    if bias != 0:
        bias += 4 * output
    for row in range(first, last):
        line = job[AT.results] + 4 * (row * outputs + output)
        if output + width <= outputs:
            finish(sums, bias, line, is_gated)
        else:
            finish(sums, bias, sums, is_gated)
            some = outputs - output
            results = array_at(line, float32, some)
            done = array_at(sums, float32, some)
            for i in range(some):
                results[i] = done[i]
        sums += _SUM_BYTES


def multiply(form: int, is_gated: bool) -> TeamTask:
    """Compile the product of a job (``ProductArguments``) with weights of ``Form(form)``."""
    code = amx_code if form == Form.TILES else block_code
    most_rows, turn_bytes = code.MAX_ROWS, code.TURN_BYTES
    is_tiled, input_bytes = form == Form.TILES, 2 if form == Form.DOTS else 4
    size = FIRST_ARGUMENT + len(AT)
    width = BLOCK_OUTPUTS // 2 if is_gated else BLOCK_OUTPUTS

    @compiled_task(Form(form).name, is_gated, AT, PANEL_TURNS, _SOURCE, *block_code.SOURCES)
    def multiply(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        count, turns, panels = job[AT.row_count], job[AT.turns], job[AT.panels]
        blocks = (job[AT.outputs] + width - 1) // width
        block_bytes = turns * turn_bytes
        rows, row_bytes, panel_turn_bytes = job[AT.rows], input_bytes * job[AT.inputs], 0
        passes = (count + most_rows - 1) // most_rows
        at_once, passes_at_once = job[AT.blocks_at_once], job[AT.passes_at_once]
        room_bytes = passes_at_once * most_rows * _SUM_BYTES  # a block's
        sums = np.empty(at_once * room_bytes + CACHE_LINE, np.uint8)
        if is_tiled:
            _round_rows(job)
            rows, row_bytes = job[AT.rounded], turns * _LINE_BYTES
            panel_turn_bytes = LINES * _LINE_BYTES
        # Prefetch weights a little ahead. If weights are read several times, prefetch half of the
        # next ones in each of the first two reads (except for the last of the blocks that share
        # panels, where that is too much).
        step = _AHEAD_BYTES
        if passes > 1:
            step = block_bytes
            if panels > 1 and at_once == 1:
                step = PANEL_TURNS * turn_bytes
        begin(form)
        for part in parts_of(job):
            part_end = blocks * (part + 1) // job[PARTS]
            for first_block in range(blocks * part // job[PARTS], part_end, at_once):
                block_end = min(first_block + at_once, part_end)
                for first_pass in range(0, passes, passes_at_once):
                    pass_end = min(first_pass + passes_at_once, passes)
                    first_row, _ = _bounds(first_pass, passes, count, is_tiled)
                    _, end_row = _bounds(pass_end - 1, passes, count, is_tiled)
                    for panel in range(panels):
                        turn = turns * panel // panels
                        some_turns = turns * (panel + 1) // panels - turn
                        for block in range(first_block, block_end):
                            here = job[AT.weights] + block * block_bytes + turn * turn_bytes
                            sums_at = aligned(sums) + (block - first_block) * room_bytes
                            for number in range(first_pass, pass_end):
                                first, last = _bounds(number, passes, count, is_tiled)
                                ahead, ahead_bytes = here + step, turn_bytes
                                if passes > 1:
                                    ahead_bytes = 0
                                    time = number - first_pass if is_tiled else number
                                    if time < 2:
                                        ahead_bytes = turn_bytes // 2
                                        ahead += time * some_turns * ahead_bytes
                                block_sums(
                                    rows + first * row_bytes + turn * panel_turn_bytes,
                                    row_bytes,
                                    last - first,
                                    here,
                                    some_turns,
                                    ahead,
                                    ahead_bytes,
                                    sums_at + (first - first_row) * _SUM_BYTES,
                                    panel > 0,
                                    form,
                                )
                    for block in range(first_block, block_end):
                        sums_at = aligned(sums) + (block - first_block) * room_bytes
                        _finish_block(job, block, first_row, end_row, sums_at, width, is_gated)
        end(form)

    return multiply
