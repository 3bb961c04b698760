"""A request as one object, and what is kept of it.

- ``task``        what was asked, and how far it got; ends exactly once
- ``deadline``    a point on the monotonic clock, read in every spelling
- ``settle``      ends tasks: metrics, log line, journal
- ``transcript``  tokens and text so far: replay, one-piece answers, continuation
- ``store``       tasks that can be asked about
- ``journal``     what is written down of those that ended
"""
