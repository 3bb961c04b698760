"""Models that the worker can run.

- ``config``    what a checkpoint's ``config.json`` says (no torch)
- ``families``  the architectures, and how they differ (no torch)
- ``errors``    what can be wrong with a checkpoint (no torch)
- ``digest``    a name for a checkpoint's contents (no torch)
- ``registry``  from a checkpoint to a model
- ``loader``    safetensors to parameters, fused on the way
- ``decoder``   the model, in a file that reads like the paper
- ``rope``      rotary positions and their stretches
"""
