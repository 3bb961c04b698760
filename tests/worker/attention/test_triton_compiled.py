"""The kernels compiled for GPUs that are not here: types, shapes and shared memory hold.

triton brings its own assembler, so this needs no GPU. What runs is left to ``test_triton.py``.
"""

import os
import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import torch  # noqa: E402

from worker.attention import KVPool  # noqa: E402
from worker.attention.triton_backend import TritonAttention  # noqa: E402

SHARED_BYTES = {89: 99 * 1024, 90: 227 * 1024}
"""What one program may have by compute capability (CUDA's programming guide)."""
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


class Launch:
    """Stands for a kernel and takes down how it is launched."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def __getitem__(self, grid: object) -> object:
        return lambda *args, **options: self.calls.append((args, options))

    def compiled(self, capability: int) -> list[object]:
        """Each launch, compiled as it would be there."""
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
                    kind = "*i32" if value.dtype == torch.int32 else NAMES[value.dtype]
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


@pytest.mark.parametrize(
    ("dtype", "shared", "dim", "capability"),
    [
        (torch.bfloat16, 4, 128, 90),
        (torch.float16, 7, 256, 89),
        (torch.float32, 4, 128, 90),
    ],
    ids=str,
)
def test_decodes_and_chunks_compile(
    dtype: torch.dtype, shared: int, dim: int, capability: int
) -> None:
    import numpy as np

    from worker.attention.trial import make_trial

    pool = KVPool(
        layers=1,
        blocks=80,
        block_tokens=16,
        kv_heads=2,
        head_dim=dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    backend = TritonAttention(pool, 2 * shared, windows=(100,))
    kernels = backend._kernels
    launches = Launch(kernels.attend), Launch(kernels.combine)

    class Recording:
        attend, combine = launches

    backend._kernels = Recording  # type: ignore[assignment]
    # A split decode and a chunk; then so many decodes that each is one program.
    for contexts, chunks in (([600], [(20, 40)]), ([5] * 20, [])):
        trial = make_trial(pool, 2 * shared, contexts, chunks, np.random.default_rng(0))
        step = backend.prepare(trial.batch)
        step.attend(0, trial.queries, trial.keys_values)
    splits = {options["SPLITS"] for _, options in launches[0].calls}
    assert 1 in splits and max(splits) > 1  # type: ignore[type-var]
    for kernel in launches[0].compiled(capability):
        assert kernel.metadata.shared <= SHARED_BYTES[capability]  # type: ignore[attr-defined]
        ptx = kernel.asm["ptx"]  # type: ignore[attr-defined]
        if dtype is not torch.float32:
            assert re.search(r"\bw?gmma|\bmma\.sync", ptx), "no matrix unit is used"
        assert re.search(r"cp\.async\.cg|ld\.global\S*v4", ptx), "keys are read in small pieces"
    assert launches[1].compiled(capability)
