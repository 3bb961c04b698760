"""Models that the worker can run.

Without torch, about checkpoints:

- ``config`` its ``config.json``; ``rope_scaling``, ``fields``
- ``families``     the architectures, and how they differ
- ``parameters``   the tensors that a model needs
- ``folder`` a folder's name, and what it is if it is no checkpoint

With torch, from files to logits:

- ``checkpoint``   the files, opened and checked
- ``loader``       to parameters, fused and packed on the way; ``cuda_loader``, ``malloc``
- ``linear``       linear layers as they lie in memory; ``blocked``: for products of our own
                   (``worker.cpu_kernels.block_products``)
- ``model``        the decoder, written as in the paper, and from a checkpoint to it
"""
