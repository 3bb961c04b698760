"""The engine by itself, without Triton or an orchestrator (``make bench-engine``).

- ``parts``          what is measured
- ``runs``           jobs of an engine, with the time of every event
- ``rig``            an engine from settings, on its own thread
- ``bare_engine``    one put together from its parts, where nothing but torch is installed
- ``checkpoints``    random weights in real shapes, made on the spot
- ``baseline``       ``transformers`` ``generate`` on the same weights
- ``bandwidth``      how fast this machine reads memory
- ``gpu``            every check and measurement that needs a GPU: ``python -m perf.engine.gpu``
- ``gpu_parts``      its sections; ``timing`` what the device's clock says
"""
