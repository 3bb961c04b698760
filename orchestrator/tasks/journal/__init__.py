"""Durable tasks, written down (OR-5).

A durable task, from its submission to the day when nothing is left of it::

    accept ─▶ queue ─▶ writer's thread: one transaction for all that came meanwhile ─▶ 202
    tokens ─▶ every 250 ms, in batches, for tasks that run that long
    end    ─▶ the same transaction removes the prompt and writes the result ─▶ terminal event
    result ─▶ removed after its retention; the rest of the row after 7 days

``file`` opens what an earlier process left, once it is locked for ours alone; ``file_store`` writes
and reads it. ``durable`` is what the event loop sees of it, with an entry for each live task;
``orchestrator.recovery`` makes tasks of what had not ended. ``store`` is what every store does, the
shared one too, and ``records`` is what is stored.
"""
