"""What a pool is made of.

- ``specs``        what is to run, and which changes need a restart
- ``units``        makes units of that on this machine: models, GPUs and ports are looked for
- ``gpus``         memory before a start, faults afterwards
- ``home``         the pool's folder: the lock, the state that outlives the manager, its socket
- ``registrar``    tells orchestrators which instances are ready
- ``service``      follows the file, and takes orders
- ``metrics``

Nothing is imported here.
"""
