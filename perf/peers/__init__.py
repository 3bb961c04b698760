"""Tidegate beside its peers, in one run: vLLM on the CPU, vllm-router over a mock backend.

In the order of the data: ``installs`` puts a peer into an environment of its own, ``servers``
starts it beside ours, ``goodput``, ``speed`` and ``relay`` measure, each in turns, and ``__main__``
writes table and bundle.
"""
