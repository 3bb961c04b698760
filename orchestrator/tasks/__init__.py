"""A request as one object, and its records.

- ``job``         a client's request, the same for all API dialects
- ``deadline``    points on the monotonic clock: for the answer and its parts
- ``task``        its progress; ends exactly once; kept while clients can ask about it
- ``transcript``  tokens and text so far: replay, one-piece answers, resume
- ``ending``      its outcome and time budget
- ``verdicts``    maps a worker's ``End`` to the client's ending
- ``settle``      ends tasks: metrics, log line, journal
- ``journal``     the record of ended tasks, and durable tasks
"""
