"""One process, and what is known of it.

- ``guardian``  runs one command; nothing of it outlives the launcher
- ``process``   a guarded process, as the launcher sees it
- ``detached``  one that outlives whoever started it, and how the next one finds it
- ``proc``      what ``/proc`` tells of processes that are nobody's children here
- ``logs``      its log file, and the part of that which a person needs
- ``ports``     free ports, and those that are not
"""
