"""Attention over a paged KV pool, behind one interface.

::

    once per step     backend.prepare(batch)            → step   (masks, gather indices)
    once per layer    step.attend(i, queries, keys_values)       writes the pool, then attends

- ``paged``      the pool and the layout of a packed batch
- ``reference``  gather and SDPA, on any device; the reference for every other backend
- ``numba``      decodes on the CPU that read the pages directly, compiled when the worker loads
- ``triton``     our own kernel, which reads the pages directly; on CUDA
- ``flashinfer`` FlashInfer's kernels for prompt chunks, if it is installed; on CUDA
- ``choice``     selects a backend by trial: random batches, compared with float64 results
- ``fixed``      for deterministic mode on the CPU: every kernel has one shape
"""

from worker.attention.paged import AttentionBackend, AttentionStep, KVPool, PackedBatch

__all__ = ["AttentionBackend", "AttentionStep", "KVPool", "PackedBatch"]
