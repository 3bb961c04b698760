"""The command ``tidegate``, on click.

Click supports options, environment variables, sub-commands and completion in three shells, and has
no dependencies. Typer would add its own layer on click, and read annotations at every start.

Each module has one command or a group of commands; ``commands`` lists them. A command imports its
dependencies when it runs, because imports take most of its start-up time. ``main`` starts up and
shows errors in one line; ``launch`` passes the arguments of ``up`` to the launcher; ``arguments``,
``asking``, ``runtime`` and ``terminal`` are shared.
"""
