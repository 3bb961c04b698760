"""What a pool is made of.

- ``specs`` what should run, and which changes need a restart
- ``units`` makes units of them on this machine: models, GPUs, ports
- ``gpus``         memory before a start, faults afterwards
- ``home``         the pool's folder: the lock, the state that outlives the manager, its socket
- ``registrar``    tells orchestrators which instances are ready
- ``service``      follows the file, and takes orders
- ``metrics``

Nothing is imported here.
"""
