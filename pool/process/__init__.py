"""Runs and finds single processes.

- ``guardian``  runs one command; nothing of it outlives the launcher
- ``process``   a guarded process, as its keeper sees it; one may outlive that, and be found again
- ``proc``      reads ``/proc`` about any process
- ``logs``      log files, and the part of one that a person needs
- ``ports``     free ports, and those that are not
"""
