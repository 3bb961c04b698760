"""``make chaos``: processes die, stand still and are replaced under load; then the checks.

- ``world``    Tritons and orchestrators
- ``faults``   what can happen to them, and to their lanes
- ``clients``  durable, resumed, streaming and plain requests, all of which know what they must get
- ``checks``   what has to hold afterwards
- ``soak``     ``make soak``: an hour in which nothing happens but bad clients
"""
