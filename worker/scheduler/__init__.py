"""Plans which requests compute what in the next step: no tensors, no devices, no clock.

- ``scheduler``     admits, starts, pauses and ends requests; plans a step
- ``plan``          what it has decided for one step
- ``config``        its limits
- ``request``       a job inside the engine; ``end_reason`` why it ends, ``refusal`` why not begun
- ``block_pool``    KV pages, references, hashes; ``prefix_cache`` shares them
- ``step_time``     estimates of how long steps take
- ``order``         who is served first, and who may go before one that lacks blocks
"""
