"""Brings a service up on this machine and keeps it up.

Set-up, with the standard library alone, since it runs before any dependency is installed:

- ``preflight``  what the machine must have, named with the command that adds it
- ``engines``    finds a Triton server (a configured path, the NGC image, a wheel); its command line
- ``bootstrap``  ``.venv`` and the wheel, as ``make`` sets them up

What runs:

- ``process``    one guarded process, its log and its ports
- ``supervise``  a unit; keeps it up: restarts what died, gives up when that is pointless
- ``units``      Triton, llama.cpp's server, the orchestrator and a store
- ``fleet``      what a pool is made of: its specs, its units on this machine, its folder
- ``manager``    keeps the members of a pool: starts, replaces and ends what differs
- ``events``     what is said of units meanwhile

A pool whose file is in memory, and which ends with its launcher, ``tidegate up``:

- ``spec``       what is asked for, as specs of a pool
- ``launcher``   starts all of it at once, and ends it
- ``command``    signals in, what a person sees, an exit status out

A pool as a file asks for it, whose instances outlive their manager, ``tidegate pool``:

- ``pool_file``  the file
- ``fleet.service``, ``pool_command``

Nothing is imported here.
"""
