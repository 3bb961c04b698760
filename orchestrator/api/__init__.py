"""Dialects: thin translations between HTTP and the gateway, none with logic of its own.

- ``context``  what every request carries: arrival, correlation id, dialect
- ``body``     JSON bodies, with errors that name the field; ``choices`` lists what they allow
- ``native``   ``/v2/tasks``
- ``events``   a task's events as server-sent events, live and replayed
- ``openai``   ``/v1``; its shapes in ``openai_types``, its chunks in ``openai_chunks``
- ``health``   ``/health``, ``/metrics``
"""
