"""Brings a service up on this machine and keeps it up.

- ``errors``     what can go wrong, as people read it
- ``machine``    what the machine must have, named with the command that adds it
- ``wheel``      a Triton server out of the ``nvidia-pytriton`` wheel
- ``bootstrap``  ``.venv`` and the wheel, as ``make`` sets them up
- ``triton``     finds a server: a configured path, the NGC image, the wheel
- ``guardian``   runs one command; nothing of it outlives the launcher
- ``process``    a guarded process, as the launcher sees it
- ``instance``   one Triton: start, ready, lost, stop
- ``service``    the orchestrator as a child process
- ``supervise``  restarts what died, gives up when that is pointless
- ``launcher``   all of it together: ``tidegate up``

Nothing is imported here: ``bootstrap`` runs before any dependency is installed.
"""
