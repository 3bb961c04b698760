"""The engine by itself, without Triton or an orchestrator (``make bench-engine``).

- ``checkpoints``    random weights in real shapes, made on the spot
- ``gpu``            what is measured, on a GPU or a CPU: ``python -m perf.engine.gpu``
"""
