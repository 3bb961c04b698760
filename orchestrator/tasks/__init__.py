"""A request as one object, and the records that are kept of it.

- ``job``         what a client asks for, the same from every dialect
- ``deadline``    points on the monotonic clock: of the whole, and of parts of the answer
- ``task``        how far it got; ends exactly once; kept as long as it can be asked about
- ``transcript``  tokens and text so far: replay, one-piece answers, resume
- ``ending``      its outcome, and where the time went
- ``verdicts``    what a worker's ``End`` means for the client
- ``settle``      ends tasks: metrics, log line, journal
- ``journal``     the record of ended tasks, and durable tasks
"""
