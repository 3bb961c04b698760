"""The engine by itself, without Triton or an orchestrator (``make bench-engine``).

- ``runs``           jobs of an engine, with the time of every event
- ``bare_engine``    one put together from its parts, where nothing but torch is installed
- ``checkpoints``    random weights in real shapes, made on the spot
- ``gpu``            what is measured, on a GPU or a CPU: ``python -m perf.engine.gpu``
- ``gpu_parts``      its sections
"""
