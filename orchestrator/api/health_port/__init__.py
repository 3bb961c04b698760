"""Health checks on a port of their own, which no load can delay (LB-4).

On the main port, checks have to wait for the event loop. ``responder`` is a small process with an
interpreter, and so a GIL, of its own; ``publisher`` starts it and tells it what to answer.
"""
