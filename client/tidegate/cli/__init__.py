"""The command ``tidegate``, on click.

Click knows options, environment variables, sub-commands and completion in three shells, and needs
nothing else; typer would add its own layer on it, and read annotations at every start.

- ``main``       its first moments, and errors in one line
- ``commands``   every command; one module each for their arguments: ``up`` (with ``worker``),
                 ``serve``, ``talk`` (``chat``), ``lists`` (``models``, ``tasks``, ``sessions``),
                 ``top``, ``doctor``; the rest is imported when they run:
- ``launch``     ``tidegate up``: from ``options`` to the launcher
- ``chat``       ``tidegate chat``
- ``show``       ``tidegate models``, ``tasks`` and ``sessions``
- ``watch``      ``tidegate top``, with ``scrape`` and ``picture``
- ``diagnosis``  ``tidegate doctor``
- ``arguments``, ``asking`` (with ``one_call``), ``completing``, ``interrupt``, ``runtime``,
  ``terminal``
"""
