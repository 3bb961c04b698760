"""Launches of triton kernels, compiled for GPUs that are not here, and what they take. Needs
triton, which brings its own assembler, but no GPU."""

import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.support.attention_cases import pool_of

NAMES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Launch:
    """Stands for a kernel and takes down how it is launched."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def __getitem__(self, grid: object) -> object:
        return lambda *args, **options: self.calls.append((args, options))

    def compiled(self, capability: int) -> list[object]:
        """Each launch, compiled as it would be there."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        found = []
        for args, options in self.calls:
            names = self.kernel.arg_names  # type: ignore[attr-defined]
            constants = {n: v for n, v in options.items() if n in names}
            signature = {name: "constexpr" for name in constants}
            # What triton finds out about the arguments of a launch.
            even = {i for i, value in enumerate(args) if isinstance(value, int) and value % 16 == 0}
            for name, value in zip(names, args, strict=False):
                if isinstance(value, torch.Tensor):
                    kind = NAMES[value.dtype]
                else:
                    kind = "fp32" if isinstance(value, float) else "i32"
                signature[name] = kind
            source = ASTSource(
                fn=self.kernel,
                signature={name: signature[name] for name in names},
                constexprs=constants,
                attrs={
                    (i,): [["tt.divisibility", 16]]
                    for i, name in enumerate(names)
                    if signature[name].startswith("*") or i in even
                },
            )
            tuned = {n: v for n, v in options.items() if n not in names}
            target = GPUTarget("cuda", capability, 32)
            found.append(triton.compile(source, target=target, options=tuned))
        return found


class KernelUsage(NamedTuple):
    """What a program of a kernel takes of a multiprocessor, in bytes."""

    spilled_bytes: int
    shared_bytes: int


def usage_of(kernel: Any) -> KernelUsage:
    """What is taken by a kernel that triton has compiled, as its assembler gave it out."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {what: int(count) for what, count in re.findall(r"(STACK|LOCAL):(\d+)", told)}
    return KernelUsage(found["STACK"] + found["LOCAL"], kernel.metadata.shared)


def attention_launches(
    dtype: torch.dtype, dim: int, shared: int, *, is_large: bool = True
) -> dict[str, Launch]:
    """Launches of a step's attention by kernel: ``attend`` of a decode whose keys are split, of a
    chunk, and of decodes that are recorded. ``is_large``: with the tiles of a GPU with an H100's
    shared memory."""
    from worker.attention.choice import make_trial
    from worker.attention.triton_backend import LARGE_CHUNKS, TritonAttention

    pool = pool_of(80, 2, dim, dtype=dtype)
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
    return launches
