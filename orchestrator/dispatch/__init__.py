"""Takes tasks from the queue to a lane, and handles what comes of them.

- ``dispatcher``    starts what can start; the queue's bound; deadlines of what waits
- ``time_limits``   when a task ends here, its worker too, and how late this process gets to run
- ``launch``        sends a task to an instance
- ``attempt``       one dispatch of a task to one instance
- ``completion``    an attempt ended or was lost: settle, retry or resume
- ``retry``         which tasks get another attempt, and when, and how many of all
- ``resume``        whether and how a begun text continues elsewhere
- ``hedge``         a second attempt for a late first token
- ``pausing``       which running jobs make room for more urgent work
- ``replan``        new plans for what waits, a few at a time
"""
