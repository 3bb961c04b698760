"""Section ``copies``: blocks of KV between the device and the host, as spilling and resuming do."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from perf.engine.timing import synchronize
from perf.report.rows import Report
from perf.report.stats import median
from worker.attention import KVPool
from worker.kv_disk.cuda_copies import memory_of

_ROUNDS = 7


def copies(report: Report, device: torch.device, scratch: Path, *, tiny: bool) -> None:
    """Time scattered blocks of an 8B model's pool, beside one copy of as many bytes in one
    piece."""
    layers, kv_heads, dim = (2, 2, 16) if tiny else (32, 8, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    pool = KVPool(
        layers=layers,
        blocks=2 * 64,
        block_tokens=16,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=device,
    )
    pool.data.normal_(generator=torch.Generator(device).manual_seed(3))
    memory = memory_of(pool.data)
    order = np.random.default_rng(4).permutation(2 * 64)
    for count in (1, 8, 64):
        here, there = order[:count].tolist(), order[64 : 64 + count].tolist()
        staging = memory.staging(count)
        size_gb = count * memory.format.block_bytes / 1e9
        whole = torch.empty(staging.nbytes, dtype=torch.uint8, device=device)
        host = torch.from_numpy(staging).flatten()

        def ms(call: Callable[[], object]) -> float:
            call()
            times = []
            for _ in range(_ROUNDS):
                synchronize(device)
                started = time.perf_counter()
                call()
                synchronize(device)
                times.append(1e3 * (time.perf_counter() - started))
            return median(times)

        note = f"{count} blocks of {memory.format.block_bytes / 2**20:.2f} MiB"
        for name, call in {
            "one piece, to the host": lambda h=host, w=whole: h.copy_(w),
            "blocks to the host": lambda b=here, s=staging: memory.copy_out(b, s),
            "one piece, to the device": lambda h=host, w=whole: w.copy_(h),
            "blocks to the device": lambda b=there, s=staging: memory.copy_in(s, b),
        }.items():
            took = ms(call)
            report.add(f"{name}, {count}", size_gb / took * 1e3, "GB/s", f"{took:.3f} ms, {note}")
        memory.copy_out(here, staging)
        memory.copy_in(staging, there)
        right = torch.equal(pool.data[:, here], pool.data[:, there])
        report.add(f"swapped out and in, {count}: the same", "yes" if right else "NO", note=note)
