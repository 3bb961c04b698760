"""Models that the worker can run.

Without torch, about checkpoints:

- ``config``       reads ``config.json``, with ``rope_scaling`` and ``fields``
- ``families``     the architectures, and how they differ
- ``parameters``   the tensors that a model needs
- ``folder``       names a model folder, and explains why one cannot be served

With torch, from files to logits:

- ``checkpoint``   opens and checks the weight files
- ``loader``       loads, fuses and packs parameters, with ``cuda_loader`` and ``malloc``
- ``linear``       linear layers by memory layout; ``blocked`` for our own products
                   (``worker.cpu_kernels.block_products``)
- ``model``        the decoder, written as in the paper, and loading it from a checkpoint
"""
