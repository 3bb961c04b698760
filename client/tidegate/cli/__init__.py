"""The command ``tidegate``, on click.

Click supports options, environment variables, sub-commands and completion in three shells, and has
no dependencies. Typer would add its own layer on click, and read annotations at every start.

Each module has one command or a group of commands. A command imports its dependencies when it
runs, because imports take most of its start-up time.

- ``main``       start-up, and errors in one line
- ``commands``   every command: from ``up`` (``worker``, ``serve``, ``picker``), ``chat``, ``slot``,
                 ``models``, ``engines``, ``tasks`` (``quote``), ``top``, ``doctor``,
                 ``operate`` (``drain``, ``swap``, ``reload``), ``pool``
- ``launch``     passes the arguments of ``up`` to the launcher
- ``arguments``, ``asking``, ``runtime``, ``terminal``: what they share
"""
