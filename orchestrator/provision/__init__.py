"""Brings a service up on this machine and keeps it up.

Set-up, with the standard library alone, since it runs before any dependency is installed:

- ``machine``    what the machine must have, named with the command that adds it
- ``wheel``      a Triton server out of the ``nvidia-pytriton`` wheel
- ``bootstrap``  ``.venv`` and the wheel, as ``make`` sets them up
- ``paths``, ``errors``

One process, and what is known of it:

- ``guardian``   runs one command; nothing of it outlives the launcher
- ``process``    a guarded process, as the launcher sees it
- ``logs``       its log file, and the part of that which a person needs
- ``ports``      free ports, and those that are not

What runs, each a ``supervise.Unit``:

- ``triton``     finds a server (a configured path, the NGC image, the wheel) and its command line
- ``control``    asks one Triton over gRPC: is it up, is its model ready, will it drain
- ``instance``   one Triton: start, ready, lost, stop
- ``service``    the orchestrator as a child process

All of it together, ``tidegate up``:

- ``spec``       what is asked for, and what is reported
- ``supervise``  restarts what died, gives up when that is pointless
- ``launcher``   starts, keeps up and ends every unit
- ``console``    what a person sees of that
- ``command``    signals in, an exit status out

Nothing is imported here.
"""
