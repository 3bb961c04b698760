"""Arithmetic on the CPU, compiled when a worker loads: by numba, with LLVM vectors and AMX inside.

Users call four modules, none of which needs numba to be imported:

- ``block_products``  rows times weights that lie in blocks
- ``tiles``           attention of decodes, cut into spans (``tile_loops`` computes them)
- ``draws``           tokens drawn from logits
- ``fused_loops``     norms, rotations and gates of a decoder

``compiled`` says whether there is a compiler here and calls it, ``team`` is the threads that share
a job's parts, ``native`` what Python lacks: addresses, atomic counters, vectors. ``*_code`` and
``*_loops`` hold what is compiled.
"""
