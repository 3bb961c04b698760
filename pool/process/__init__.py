"""Runs and finds single processes.

- ``guardian``  runs one command; none of its processes outlive the launcher
- ``process``   a guarded process for its keeper; may outlive the keeper, and be found again
- ``proc``      reads ``/proc`` for any process
- ``logs``      log files, and the useful part of a log
- ``ports``     finds free ports, and reports ports in use
"""
