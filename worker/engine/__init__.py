"""The loop that turns jobs into tokens.

- ``loop``       one step after the other, for every engine: expire, take commands, schedule, apply
- ``backend`` computes for it
- ``engine``     ours: the loop over our scheduler and runner; ``build`` makes it from settings
- ``executor`` computes steps, one ahead if the runner can, in halves when one fails
- ``expiry``     deadline, abort and pause of every request in every step
- ``card`` the engine's card
- ``kv_events``  what enters and leaves the prefix cache, across threads
"""
