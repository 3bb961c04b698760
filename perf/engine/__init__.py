"""Parts of ``make bench-engine``: the engine by itself, without Triton or an orchestrator.

- ``shapes``      random-weight checkpoints of real shapes, made on the spot
- ``rig``         an engine on its own thread, with the time of every event
- ``peer``        ``transformers`` ``generate`` on the same weights
- ``aside``       computing beside an engine without slowing it down
- ``bandwidth``   how fast this machine reads memory
- ``parts``       what is measured
"""
