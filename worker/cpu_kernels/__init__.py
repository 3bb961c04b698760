"""Arithmetic on the CPU, compiled when a worker loads: by numba, with LLVM vectors and AMX inside.

Users call three modules, none of which needs numba to be imported:

- ``block_products`` rows times weights in blocks
- ``tiles``           attention of decodes, in spans that ``tile_loops`` cuts and computes
- ``draws``           tokens drawn from logits

and, only where there is a compiler, ``fused_loops``: norms and rotations of a decoder.

``compiled`` says whether there is a compiler here and calls it, ``team`` is the threads that share
a job's parts, ``native`` has addresses, atomic counters and vectors. ``*_code`` and ``*_loops``
hold the compiled code.
"""
