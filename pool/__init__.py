"""Brings a service up on this machine and keeps it up.

Set-up, with the standard library alone, since it runs before any dependency is installed:

- ``preflight``  what the machine must have, named with the command that adds it
- ``engines``    finds a Triton server (a configured path, the NGC image, a wheel); its command line
- ``bootstrap``  ``.venv`` and the wheel, as ``make`` sets them up

What runs:

- ``process``    one guarded process, its log and its ports
- ``supervise`` keeps a unit up: restarts it, gives up if that is pointless
- ``units``      Triton, llama.cpp's server, the orchestrator and a store
- ``fleet`` a pool's specs, its units on this machine, its folder
- ``manager``    keeps the members of a pool: starts, replaces and ends what differs
- ``events`` what happens to units

A pool whose file is in memory, and which ends with its launcher, ``tidegate up``:

- ``spec`` the request, as specs of a pool
- ``launcher``   starts all of it at once, and ends it
- ``command`` signals, terminal output, exit status

A pool from a file, with instances that outlive their manager, ``tidegate pool``:

- ``pool_file``  the file
- ``fleet.service``, ``pool_command``

Nothing is imported here.
"""
