"""From the queue to a lane, and what comes of it.

- ``dispatcher``  starts what can start; deadlines of what waits
- ``attempt``     one dispatch of a task to one instance
- ``retry``       which tasks get another attempt, and when
- ``hedge``       a second attempt for a late first token
- ``pausing``     who makes room for more urgent work
- ``replan``      new plans for what waits, a few at a time
"""
