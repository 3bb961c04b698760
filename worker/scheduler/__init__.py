"""Plans which requests compute what in the next step: no tensors, no devices, no clock.

- ``scheduler``     admits, starts, pauses and ends requests; plans a step
- ``plan``          its decision for one step
- ``config``        its limits
- ``request``       a job inside the engine
- ``end_reason``    why it ends
- ``refusal``       why it cannot start
- ``block_pool``    KV pages, references, hashes
- ``prefix_cache``  shares them between requests
- ``sessions``      keeps a conversation's between two turns
- ``step_time``     estimates of how long steps take
- ``order``         which is served first, and which may pass one that lacks blocks
"""
