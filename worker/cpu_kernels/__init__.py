"""Arithmetic on the CPU, compiled when a worker loads: by numba, with LLVM vectors and AMX inside.

Two modules need no numba to be imported:

- ``block_products`` rows times weights in blocks
- ``draws``           tokens drawn from logits

and two are for where there is a compiler:

- ``attention_loops`` attention of decodes
- ``step_loops``      norms and rotations of a decoder, and all of a step in turn

``compiled`` says whether there is a compiler here and calls it, ``team`` is the threads that share
a job's parts, ``native`` has addresses, atomic counters and vectors. ``*_code`` and ``*_loops``
hold the compiled code.
"""
