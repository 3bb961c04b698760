"""Models that the worker can run.

Without torch, about checkpoints:

- ``config``       what its ``config.json`` says; ``rope_scaling``, ``fields``
- ``families``     the architectures, and how they differ
- ``parameters``   the tensors that a model needs
- ``folder``       the name of a folder, and what it is when it is not a checkpoint

With torch, from files to logits:

- ``checkpoint``   the files, opened and checked
- ``loader``       to parameters, fused and packed on the way; ``cuda_loader``, ``malloc``
- ``linear``       linear layers as they lie in memory; ``blocked``: for products of our own
                   (``worker.cpu_kernels.block_products``)
- ``model``        the decoder, written as in the paper, and from a checkpoint to it
"""
