"""Compares Tidegate and vLLM on the CPU in one run. ``servers`` starts both, ``goodput`` and
``speed`` measure them in turns, and ``__main__`` writes the table and the bundle.
"""
