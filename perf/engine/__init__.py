"""The engine by itself, without Triton or an orchestrator (``make bench-engine``).

- ``parts``          what is measured
- ``rig``            an engine on its own thread, with the time of every event
- ``shapes``         random-weight checkpoints of real shapes, made on the spot
- ``peer``           ``transformers`` ``generate`` on the same weights
- ``bandwidth``      how fast this machine reads memory
- ``aside``          computing beside an engine without slowing it down
- ``gpu``            every check and measurement that needs a GPU: ``python -m perf.engine.gpu``
- ``gpu_parts``      its sections that run an engine, ``attention`` the kernels, ``timing`` events
- ``fit_step_time``  the paced synthetic engine's constants from a real engine
"""
