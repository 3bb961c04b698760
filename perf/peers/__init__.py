"""Tidegate beside its peers, in one run: vLLM on the CPU, and vllm-router over a mock backend.

In the order of the data: ``installs`` puts a peer into an environment of its own, ``servers``
starts it beside ours, ``stories`` are the requests, ``goodput``, ``speed`` and ``relay`` measure,
each in turns, and ``__main__`` writes table and bundle.
"""
