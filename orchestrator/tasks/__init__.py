"""A request as one object, and what is kept of it.

- ``job``         what a client asks for, the same from every dialect
- ``deadline``    points on the monotonic clock: of the whole, and of parts of the answer
- ``task``        how far it got; ends exactly once
- ``transcript``  tokens and text so far: replay, one-piece answers, resume
- ``ending``      what it came to, and where the time went
- ``verdicts``    what a worker's ``End`` means for the client
- ``settle``      ends tasks: metrics, log line, journal
- ``store``       tasks that can be asked about
- ``journal``     what is written down of those that ended
"""
