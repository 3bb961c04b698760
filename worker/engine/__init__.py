"""The loop that turns jobs into tokens.

- ``loop``       one step after the other, for every engine: expire, take commands, schedule, apply
- ``backend``    what computes for it
- ``engine``     ours: the loop over our scheduler and runner; ``build`` makes it from settings
- ``executor``   has a step computed, one ahead where the runner can, in halves when one fails
- ``expiry``     deadline, abort and pause of every request in every step
- ``card``       what the engine says of itself
- ``kv_events``  what enters and leaves the prefix cache, across threads
"""
