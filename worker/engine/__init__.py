"""The loop that turns jobs into tokens.

- ``loop``      the step loop of every engine: expire, take commands, schedule, compute, apply
- ``backend``   the interface to what computes the steps of that loop
- ``engine``    our own engine: the loop over our scheduler and runner; ``build`` creates it
- ``executor``  computes steps, one ahead if the runner supports it, and in halves after a failure
- ``expiry``    checks every request's deadline, abort flag and pause flag in every step
- ``card``      the engine's model card
- ``kv_events`` passes prefix cache changes to a reader on another thread
"""
