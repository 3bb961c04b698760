"""The journal of durable tasks (OR-5).

A durable task's life::

    accept ─▶ queue ─▶ writer's thread: one transaction for all waiting ones ─▶ 202
    tokens ─▶ every 250 ms, in batches, for tasks that run that long
    end    ─▶ the same transaction removes the prompt and writes the result ─▶ terminal event
    result ─▶ removed after its retention; the rest of the row after 7 days

``file`` opens an earlier process's file after locking it exclusively; ``file_store`` writes and
reads it. ``durable`` is the event loop's side, with an entry for each live task;
``orchestrator.recovery`` takes over unfinished tasks. ``store`` is the base of all stores,
including the shared one, and ``records`` has the stored forms.
"""
