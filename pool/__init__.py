"""Brings a service up on this machine and keeps it up.

Set-up modules use only the standard library, because they run before dependencies are installed:

- ``preflight``  checks the machine's requirements; names the command that adds a missing one
- ``engines``    finds a Triton server (a configured path, the NGC image, a wheel); its command line
- ``bootstrap``  sets up ``.venv`` and the wheel for ``make``

Run-time modules:

- ``process``    one guarded process, its log and its ports
- ``supervise`` keeps a unit up: restarts it, gives up if that is pointless
- ``units``      Triton, llama.cpp's server, the orchestrator and a store
- ``fleet``      a pool's specs, its units on this machine, its folder
- ``manager``    keeps the members of a pool: starts, replaces and ends those that differ
- ``events``     events of units

``tidegate up``, a pool whose file is in memory and which ends with its launcher:

- ``launcher``   starts all units at once, and ends them
- ``command``    signals, terminal output, exit status

``tidegate pool``, a pool from a file, whose instances outlive their manager:

- ``pool_file``  the file
- ``fleet.service``, ``pool_command``

This module imports nothing.
"""
