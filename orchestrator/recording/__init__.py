"""What became of the latest requests, without a word of them, and why one of them missed.

- ``facts``      what is recorded of a request and of an instance
- ``recorder``   keeps the latest of it, and what surrounds one request
- ``findings``   what a replay tells of a request
- ``explainer``  has a process of its own replay it (``python -m perf.sim.replay``)
- ``wording``    why a request missed, in words
"""
