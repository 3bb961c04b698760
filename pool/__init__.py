"""Brings a service up on this machine and keeps it up.

- Set-up, with the standard library only, because it runs before dependencies are installed:
  ``preflight``, ``engines`` (finds a Triton server), ``bootstrap`` (for ``make``).
- Units: ``process`` (one guarded process), ``units``, ``supervise`` (keeps a unit up), ``events``.
- Pools: ``fleet`` (specs, this machine, the folder), ``manager`` (starts, replaces, ends members).
- ``tidegate up``, a pool whose file is in memory and which ends with its launcher: ``launcher``,
  ``command``.
- ``tidegate pool``, a pool from a file, whose instances outlive their manager: ``pool_file``,
  ``fleet.service``, ``pool_command``.
"""
