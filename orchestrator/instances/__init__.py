"""Tracks the instances (Triton servers) and their health.

- ``registry``       the set of instances: add, retire, cordon, remove; the snapshot for placement
- ``instance``       one Triton: lanes, card, load, state; ``candidate``: its view for placement
- ``monitor``        sets the states from lanes' reports and heartbeats
- ``served_models``  models by name, each with the encoder of its prompts
- ``discovery`` keeps the registry in step with the sources of addresses; ``addresses``: names
- ``breaker`` takes out an instance that fails, by its jobs' ends
- ``concurrency``    the number of jobs in flight per instance
- ``prefix_index``   which instance holds which KV blocks
- ``needed``         the number of instances that the present load needs
- ``metrics``
"""
