"""The command ``tidegate``, on click.

Click knows options, environment variables, sub-commands and completion in three shells, and needs
nothing else; typer would add its own layer on it, and read annotations at every start.

A module has a command or a family of them, and imports what these need when they run: a person
waits for imports more than for anything else.

- ``main``       its first moments, and errors in one line
- ``commands``   every command: from ``up`` (``worker``, ``serve``, ``picker``), ``chat``, ``slot``,
                 ``models``, ``engines``, ``tasks`` (``quote``), ``top``, ``doctor``,
                 ``operate`` (``drain``, ``swap``, ``reload``), ``pool``
- ``launch``     from the arguments of ``up`` to the launcher
- ``arguments``, ``asking``, ``runtime``, ``terminal``: what they share
"""
