"""The journal of durable tasks (OR-5).

A durable task's life::

    accept ─▶ queue ─▶ writer's thread: one transaction for all waiting ones ─▶ 202
    tokens ─▶ every 250 ms, in batches, for tasks that run that long
    end    ─▶ the same transaction removes the prompt and writes the result ─▶ terminal event
    result ─▶ removed after its retention; the rest of the row after 7 days
"""
