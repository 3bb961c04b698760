"""Plans the requests and tokens of the next step: no tensors, no devices, no clock.

- ``scheduler``     admits, starts, pauses and ends requests; plans a step
- ``plan``          its decision for one step
- ``config``        its limits
- ``request``       a job inside the engine
- ``end_reason``    why a job ends
- ``roster``        the requests that an engine holds, and why it refuses one
- ``block_pool``    KV pages, references, hashes
- ``prefix_cache``  shares KV pages between requests
- ``sessions``      keeps a conversation's pages between two turns
- ``step_time``     estimates of step times
- ``order``         the order of requests, and which may pass one that lacks blocks
"""
