"""Benchmarks of the engine alone, without Triton or an orchestrator (``make bench-engine``).

- ``checkpoints``    generates random weights in the shapes of real models
- ``gpu``            the measurements, on a GPU or a CPU: ``python -m perf.engine.gpu``
"""
