"""The parts of a pool.

- ``specs``        the wanted configuration, and which changes need a restart
- ``units``        creates units from the specs on this machine: models, GPUs, ports
- ``gpus``         checks GPU memory before a start, watches for faults afterwards
- ``home``         the pool's folder: the lock, the state that outlives the manager, its socket
- ``registrar``    tells orchestrators which instances are ready
- ``service``      follows the file, and executes commands
- ``metrics``      metrics of the manager

This module imports nothing.
"""
