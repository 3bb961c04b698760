"""The real orchestrator and the real worker on virtual time; recordings run through them again.

Beneath, for the whole simulator:

- ``loop``     time that jumps to the next timer
- ``worker``   the real worker without Triton and a model, ``lane`` the way to it
- ``service``  the orchestrator in front of such workers

A recording (``orchestrator.recorder``) again, for ``perf.sim.what_if``:

- ``recording``   what a service recorded, and what of it surrounds one request
- ``known``       what is known beforehand: settings, lengths of answers, paces
- ``under_way``   how far a request had come at a moment
- ``again``       what was recorded as arrivals and instances, and what becomes of each request
- ``verdict``     what alone would have met a request that missed
"""
