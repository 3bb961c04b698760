"""What our kernels take of an H100's multiprocessors, compiled for it on any machine.

    python -m perf.engine.occupancy [--json PATH]

Needs ``triton``, which brings its own assembler, and no GPU: nothing runs, so none of this is about
speed. Registers, shared memory and what spills are as the assembler gave them out; the programs of
a multiprocessor that fit at once follow by the rules of CUDA's occupancy calculator.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from perf.engine.compiled_kernels import Launch
from perf.report.command import begin, new_console, new_parser
from perf.report.machine import versions
from perf.report.table import new_table

CAPABILITY: Final = 90
_REGISTERS, _OF_A_WARP, _WARPS_APART = 65_536, 256, 4
_SHARED_BYTES, _RESERVED_BYTES = 228 * 1024, 1024
_WARPS, _PROGRAMS = 64, 32
"""What a multiprocessor of compute capability 9.0 has: registers, given out in units of so many to
a warp and of so many warps; shared memory, and what of it each program takes besides; most warps
and programs (CUDA's programming guide and occupancy calculator)."""
HEADS: Final = ((64, 4), (80, 1), (96, 3), (128, 4), (128, 8), (256, 2))
"""Dimensions of a head, and query heads that share a KV head."""


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """What a program of a kernel takes. ``aimed`` are the programs at once that its tiling counts
    on; 0: none."""

    kernel: str
    case: str
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    aimed: int = 0

    @property
    def programs(self) -> int:
        """Number of programs that fit on a multiprocessor at once."""
        of_warp = -(-self.registers * 32 // _OF_A_WARP) * _OF_A_WARP
        warps = _REGISTERS // of_warp // _WARPS_APART * _WARPS_APART
        by_memory = _SHARED_BYTES // (self.shared_bytes + _RESERVED_BYTES)
        return min(warps // self.warps, by_memory, _WARPS // self.warps, _PROGRAMS)


def usage_of(kernel: Any, name: str, case: str, aimed: int = 0) -> KernelUsage:
    """What is taken by a kernel that triton has compiled."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {what: int(count) for what, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return KernelUsage(
        kernel=name,
        case=case,
        warps=kernel.metadata.num_warps,
        registers=found["REG"],
        spilled_bytes=found["STACK"] + found["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        aimed=aimed,
    )


def attention_launches(
    dtype: torch.dtype, dim: int, shared: int, *, is_large: bool = True
) -> tuple[dict[str, Launch], tuple[int, int]]:
    """Launches of a step's attention by kernel: ``attend`` of a decode whose keys are split, of a
    chunk, and of decodes that are recorded; and the programs at once that decodes and chunks aim
    at. ``is_large``: with the tiles of a GPU with an H100's shared memory."""
    from worker.attention import KVPool
    from worker.attention.trial import make_trial
    from worker.attention.triton_backend import LARGE_CHUNKS, TritonAttention

    pool = KVPool(
        layers=1,
        blocks=80,
        block_tokens=16,
        kv_heads=2,
        head_dim=dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    chunks = LARGE_CHUNKS if is_large else None
    backend = TritonAttention(pool, 2 * shared, windows=(100,), chunks=chunks)
    names = ("attend", "combine", "share_out")
    launches = {name: Launch(getattr(backend._kernels, name)) for name in names}
    backend._kernels = SimpleNamespace(**launches)  # type: ignore[assignment]
    trial = make_trial(pool, 2 * shared, [600], [(20, 40)], np.random.default_rng(0))
    backend.prepare(trial.batch).attend(0, trial.queries, trial.keys_values)
    one = trial.batch.block_table[:1]
    table, contexts = torch.from_numpy(one.astype(np.int32)), torch.ones(1, dtype=torch.int32)
    fixed = backend.decode_step(torch.zeros(1, dtype=torch.int64), table, contexts, 600)
    fixed.attend(0, trial.queries[:1], trial.keys_values[:1])
    return launches, (backend._decodes.at_once, backend._chunks.at_once)


def of_attention() -> Iterator[KernelUsage]:
    """What is taken by attention's kernels, by head sizes."""
    cases = [(torch.bfloat16, dim, shared) for dim, shared in HEADS]
    for dtype, dim, shared in [*cases, (torch.float32, 128, 4)]:
        launches, (decodes, chunks) = attention_launches(dtype, dim, shared)
        case = f"heads of {dim}, {shared} to a KV head, {str(dtype).removeprefix('torch.')}"
        _, chunk, decode = launches["attend"].compiled(CAPABILITY)
        yield usage_of(decode, "attend, decodes", case, decodes)
        yield usage_of(chunk, "attend, chunks", case, chunks)
        if (dim, shared, dtype) == (128, 4, torch.bfloat16):
            for name in ("combine", "share_out"):
                yield usage_of(launches[name].compiled(CAPABILITY)[-1], name, case)


def of_others() -> Iterator[KernelUsage]:
    """What is taken by the other kernels, in the shape of Llama 3.1 8B."""
    from worker.models import fused, fused_kernels
    from worker.sampling import triton_draws

    draws = Launch(triton_draws.draw)
    whole, triton_draws.draw = triton_draws.draw, draws
    try:
        triton_draws.draw_rows(
            torch.zeros(2, 128_256), torch.zeros(2, dtype=torch.int64), torch.zeros(5, 2)
        )
    finally:
        triton_draws.draw = whole
    yield usage_of(draws.compiled(CAPABILITY)[0], "draw", "a vocabulary of 128,256")
    names = ("add_norm", "rotate", "gate")
    kernels: Any = SimpleNamespace(**{n: Launch(getattr(fused_kernels, n)) for n in names})
    x = torch.zeros(2, 4096, dtype=torch.bfloat16)
    fused.launch_add_norm(kernels, x, x, x[0], 1e-5)
    heads, table = x.new_zeros(2, 48, 128), x.new_zeros(2, 1, 128)
    fused.launch_rotate(kernels, heads[:, :40], table, table)
    fused.launch_gate(kernels, x.new_zeros(2, 2 * 14_336))
    for name in names:
        (kernel,) = getattr(kernels, name).compiled(CAPABILITY)
        yield usage_of(kernel, name, "the shape of Llama 3.1 8B, bfloat16")


def main() -> int:
    """Compile all of them; returns 0."""
    parser = new_parser(__doc__)
    args = parser.parse_args()
    recording = begin(parser, args, "perf.engine.occupancy", *sys.argv[1:])
    table = new_table("kernel", "case", "warps", "registers", "spilled", "shared", "at once")
    rows = []
    with tempfile.TemporaryDirectory(prefix="tidegate-kernels-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for one in (*of_attention(), *of_others()):
            numbers = (one.warps, one.registers, one.spilled_bytes, one.shared_bytes, one.programs)
            table.add_row(one.kernel, one.case, *map(str, numbers))
            rows.append(one)
    new_console(130).print(table)
    told = [asdict(one) | {"programs": one.programs} for one in rows]
    recording.save(recording.facts() | {"versions": versions("triton"), "rows": told})
    return 0


if __name__ == "__main__":
    sys.exit(main())
