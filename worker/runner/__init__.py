"""Computes the tokens of a plan.

- ``base``          the interface of a runner; ``build`` makes one from settings
- ``torch_runner``  on the CPU; ``cuda_runner`` on CUDA, with ``cuda_graphs``; ``synthetic`` invents
tokens, ``scripted`` takes them from a script - ``forward``       packed tokens through the model -
``memory``, ``out_of_memory`` available memory; steps that do not fit - ``device``        which one,
in which precision, with how many threads - ``device_probe``, ``xid_watch``  whether the device
still works; ``simulated_device`` fails on request
"""
