"""Sends tasks from the queue to lanes, and handles the results.

- ``dispatcher``    starts tasks; the queue's bound; deadlines of waiting tasks
- ``time_limits``   when a task ends here and at its worker; the event loop's delay
- ``launch``        sends a task to an instance
- ``attempt``       one dispatch of a task to one instance
- ``completion``    ends of attempts: settle, retry or resume
- ``retry``         which tasks get another attempt, when, and how many of all
- ``resume``        whether and how a partial text continues on another instance
- ``pausing``       pauses running jobs for more urgent work
- ``replan``        new plans for waiting tasks, a few at a time
"""
