"""The workers' side: tracks the instances and their health.

- ``registry``       the set of instances: add, retire, cordon, remove; the snapshot for placement
- ``instance``       one Triton: lanes, card, load, state; ``candidate`` is it as placement sees it
- ``monitor``        decides the states by what lanes report, and by heartbeats
- ``served_models``  models by name, each with the encoder of its prompts
- ``discovery`` keeps the registry in step with the sources of addresses; ``addresses``: names
- ``breaker`` takes out an instance that fails, by its jobs' ends
- ``concurrency``    how many jobs to have in flight there
- ``prefix_index``   which instance holds which KV blocks
- ``needed``         how many the present load needs
- ``metrics``
"""
