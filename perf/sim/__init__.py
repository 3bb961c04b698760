"""Hours of load in seconds: the real orchestrator under a virtual clock, in front of model workers.

Everything between the API and the lanes is the real code: admission, forecast, queue, placement,
dispatch, settlement. Only lanes are replaced (``worker``), and the event loop's time (``loop``).

    python -m perf.sim [--minutes 3] [--loads 0.5 1 2] [--seed N]
"""
