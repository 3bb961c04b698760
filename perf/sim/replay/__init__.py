"""The real orchestrator and the real worker on virtual time; recordings run through them again.

- ``loop``     time that jumps to the next timer
- ``worker``   the real worker without Triton and a model, ``lane`` the way to it
- ``service``  the orchestrator in front of such workers
- ``again``    what a service recorded (``orchestrator.recorder``) as arrivals and instances
- ``verdict``  what alone would have met a request that missed
"""
