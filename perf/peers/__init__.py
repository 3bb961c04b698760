"""Tidegate beside vLLM on the CPU, in one run.

In the order of the data: ``installs`` puts a peer into an environment of its own, ``servers``
starts it beside ours, ``goodput`` and ``speed`` measure, each in turns, and ``__main__`` writes
table and bundle.
"""
