"""``make chaos``: kills, stops and replaces processes under load, then checks the results.

- ``world``    Tritons and orchestrators
- ``faults``   faults of these processes, and of their lanes
- ``clients``  durable, resumed, streaming and plain requests, each with a known correct answer
- ``checks``   checks after the run
- ``soak``     ``make soak``: an hour with no faults except bad clients
"""
