"""Brings a service up on this machine and keeps it up.

Set-up, with the standard library alone, since it runs before any dependency is installed:

- ``preflight``  what the machine must have, named with the command that adds it
- ``engines``    finds a Triton server (a configured path, the NGC image, a wheel); its command line
- ``bootstrap``  ``.venv`` and the wheel, as ``make`` sets them up
- ``paths``, ``errors``

What runs:

- ``process``    one guarded process, its log and its ports
- ``units``      Triton, the orchestrator and a store, each a ``supervise.Unit``
- ``supervise``  keeps a unit up: restarts what died, gives up when that is pointless
- ``events``     what is said of units meanwhile

All of it together, ``tidegate up``:

- ``spec``       what is asked for
- ``launcher``   starts, keeps up and ends every unit
- ``console``    what a person sees of that
- ``command``    signals in, an exit status out

The instances of a machine, ``tidegate pool``:

- ``pool_file``  what is asked for, as a file has it
- ``manager``    starts, replaces and ends what differs; what it keeps outlives it
- ``fleet``      its parts
- ``pool_command``

Nothing is imported here.
"""
