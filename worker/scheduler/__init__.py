"""Who computes what in the next step: no tensors, no devices, no clock.

- ``scheduler``     admits, starts, pauses and ends requests; plans a step
- ``plan``          what it has decided for one step
- ``request``       a job inside the engine
- ``block_pool``    KV pages, references, hashes; ``prefix_cache`` shares them
- ``step_time``     what a step takes
- ``prompt_order``  whose prompt is computed first; ``pauses`` who stands still
- ``records``, ``lru``
"""
