"""Health checks on their own port, which no load can delay (LB-4).

On the main port, checks wait for the event loop. ``responder`` is a small process with its own GIL.
``publisher`` starts it and sends it the answers.
"""
