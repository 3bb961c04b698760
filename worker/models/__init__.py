"""Models that the worker can run, each in a file that reads like the paper.

- ``config``    what a checkpoint's ``config.json`` says (no torch)
- ``errors``    what can be wrong with a checkpoint (no torch)
- ``digest``    a name for a checkpoint's contents (no torch)
- ``registry``  from ``architectures`` to a model
- ``loader``    safetensors to parameters, fused on the way
- ``llama``     Llama
"""
