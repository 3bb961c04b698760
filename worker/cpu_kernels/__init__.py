"""Arithmetic on the CPU, compiled by numba when a worker loads, with LLVM vectors and AMX.

Two modules can be imported without numba:

- ``block_products`` multiplies rows by weights in blocks
- ``draws``           draws tokens from logits

Two need a compiler:

- ``attention_loops`` attention of decodes on the CPU
- ``step_loops``      a decoder's norms and rotations, and a whole step as a sequence of jobs

``compiled`` checks for a compiler and calls it. ``team`` runs a job's parts on several threads.
``native`` has addresses, atomic counters and vectors. ``*_code`` and ``*_loops`` have the code to
compile.
"""
