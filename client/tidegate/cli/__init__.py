"""The command ``tidegate``.

- ``main``       chooses the command
- ``up``         ``tidegate up`` and ``tidegate worker``
- ``serve``      ``tidegate serve``
- ``chat``       ``tidegate chat``
- ``runtime``    where the code is that serves
- ``arguments``, ``interrupt``
"""
