"""The parts of a pool manager (``pool.manager``).

- ``spec``         one instance that is to run, and which changes need a restart
- ``member``       a running one: its states, from the first start to its end
- ``triton``       its Triton, started detached or adopted
- ``llamacpp``     its llama.cpp server instead, for a GGUF file
- ``beside``       an orchestrator beside the instances
- ``home``         the pool's folder: the lock, the state that outlives the manager
- ``registrar``    tells orchestrators which instances are ready
- ``gpus``         memory before a start, faults afterwards
- ``control``      the socket by which a command speaks to the manager
- ``metrics``

Nothing is imported here.
"""
