"""Durable tasks, written down (OR-5).

A durable task's life::

    accept ─▶ queue ─▶ writer's thread: one transaction for all waiting ones ─▶ 202
    tokens ─▶ every 250 ms, in batches, for tasks that run that long
    end    ─▶ the same transaction removes the prompt and writes the result ─▶ terminal event
    result ─▶ removed after its retention; the rest of the row after 7 days

``file`` opens what an earlier process left, once it is locked for ours alone; ``file_store`` writes
and reads it. ``durable`` is the event loop's side, with an entry for each live task;
``orchestrator.recovery`` takes over unfinished tasks. ``store`` is common to all stores, the shared
one too, and ``records`` has the stored forms.
"""
