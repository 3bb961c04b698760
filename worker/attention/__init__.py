"""Attention over a paged KV pool, behind one seam.

::

    once per step     backend.prepare(batch)            → step   (masks, gather indices)
    once per layer    step.attend(i, queries, keys_values)       writes the pool, then attends

- ``paged``      the pool and the layout of a packed batch
- ``reference``  gather and SDPA, on any device; the oracle for every other backend
- ``numba``      decodes on the CPU from the pages, compiled when the worker loads
- ``triton``     our own kernel, from the pages; on CUDA
- ``flashinfer`` FlashInfer's kernels for chunks of prompts, where it is installed; on CUDA
- ``choice``     which of them attends, by trial: random batches and what float64 makes of them
- ``fixed``      for deterministic mode on the CPU: all kernels in one shape
"""

from worker.attention.paged import AttentionBackend, AttentionStep, KVPool, PackedBatch

__all__ = ["AttentionBackend", "AttentionStep", "KVPool", "PackedBatch"]
