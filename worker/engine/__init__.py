"""The loop that turns jobs into tokens.

- ``build``      from settings to an engine with its tokenizer and card; ``card``, ``digest``
- ``engine``     one step after the other: expire, take commands, schedule, execute, apply
- ``executor``   has a step computed, one ahead where the runner can, in halves when one fails
- ``expiry``     deadline and abort of every request in every step
- ``kv_events``  what enters and leaves the prefix cache, across threads
- ``stats``      totals
- ``threaded``   the thread that any engine runs on, ours or a third-party one
"""
