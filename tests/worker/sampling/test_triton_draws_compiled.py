"""The draws' kernel compiled for a GPU that is not here, and recorded on one that is.

As ``attention/test_triton_compiled.py``.
"""

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from tests.support.compiled_kernels import Launch, usage_of
from worker.sampling import triton_draws

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("vocabulary", [128_256, 151_937])
def test_it_compiles(vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch = Launch(triton_draws.draw)
    monkeypatch.setattr(triton_draws, "draw", launch)
    chosen = torch.zeros(2, dtype=torch.int64)
    triton_draws.draw_rows(torch.zeros(2, vocabulary), chosen, torch.zeros(5, 2))
    (kernel,) = launch.compiled(90)
    usage = usage_of(kernel)
    assert usage.shared_bytes < 48 * 1024
    assert usage.spilled_bytes <= 64  # its 512 threads have every register that there is
    # Rows that begin at a multiple of 16 bytes are read that much at a time.
    reads_wide = "ld.global.v4" in kernel.asm["ptx"]  # type: ignore[attr-defined]
    assert reads_wide or vocabulary % 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_draw_is_that_of_a_launch() -> None:
    device, vocabulary = torch.device("cuda"), 40_000
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(4, vocabulary, generator=generator)).to(device)
    chances = torch.zeros((5, 8), device=device)
    chosen = torch.arange(4, device=device)
    triton_draws.draw_rows(logits, chosen, chances[:, :4])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_draws.draw_rows(logits, chosen, chances[:, :4])
    # By row: temperature, min_p, a number, top_k, top_p.
    rows = [[0.8, 0, 0.3, 0, 1], [0, 0, 0, 0, 1], [1.1, 0, 0.8, 50, 1], [0.9, 0.01, 0.1, 0, 0.7]]
    chances[:, :4] = torch.tensor(rows).T
    graph.replay()
    assert out.tolist() == triton_draws.draw_rows(logits, chosen, chances[:, :4]).tolist()
    assert out[1] == 1
