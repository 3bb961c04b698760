"""Runs and finds single processes.

- ``guardian``  runs one command; nothing of it outlives the launcher
- ``process``   a guarded process, as the launcher sees it
- ``detached``  a process that outlives its starter, and how the next one finds it
- ``proc``      reads ``/proc`` about processes that are not our children
- ``logs``      log files, and the part of one that a person needs
- ``ports``     free ports, and those that are not
"""
