"""From a plan to tokens.

- ``base``          what a runner is; ``build`` makes one of settings
- ``torch_runner``  on the CPU; ``cuda_runner`` on CUDA, with ``cuda_graphs``; ``synthetic`` makes
  tokens up
- ``forward``       packed tokens through the model
- ``memory``, ``cgroup``, ``out_of_memory``  what there is, and what becomes of a step beyond it
- ``device``, ``precision``, ``utilization``
"""
