"""Tidegate and vLLM on the CPU, in one run: ``servers`` starts both, ``goodput`` and ``speed``
measure, each in turns, and ``__main__`` writes table and bundle.
"""
