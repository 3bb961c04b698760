"""Health checks on a port of their own, which no load can delay (LB-4).

The main port answers them on the event loop, behind whatever the loop is at. ``responder`` is a
small process with an interpreter, and so a GIL, of its own; ``publisher`` starts it and tells it
what to answer.
"""
