"""The parts of a pool manager (``pool.manager``).

- ``wish``         one instance that is to run, and what of it is worth a restart
- ``member``       one that does: its states, from the first start to its end
- ``triton``       its Triton, started detached or adopted
- ``beside``       an orchestrator beside the instances
- ``home``         the pool's folder: the lock, the state that outlives the manager
- ``registrar``    tells orchestrators which instances are ready
- ``gpus``         memory before a start, faults afterwards
- ``control``      the socket by which a command speaks to the manager
- ``metrics``

Nothing is imported here.
"""
