"""Computes the tokens of a plan.

- ``base``         the interface of a runner; ``build`` creates a runner from settings
- ``torch_runner`` runs on the CPU; ``cuda_runner`` runs on CUDA, with ``cuda_graphs``
- ``synthetic``    invents tokens; ``scripted`` takes them from a script
- ``forward``      runs a step's packed tokens through the model
- ``memory``       measures and limits memory; ``out_of_memory`` handles steps that do not fit
- ``device``       chooses the device, the precision and the number of threads
- ``device_probe``, ``xid_watch`` check that the device works; ``simulated_device`` fails on request
"""
