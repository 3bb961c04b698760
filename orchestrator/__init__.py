"""The service in front of Triton: a request is one object that moves through named stages.

The folders are those stages, in this order:

- ``api``         dialects at the edge: native, OpenAI, health, metrics
- ``service``     takes a request through the stages
- ``prompts``     text and chats become token ids with the worker's own tokenizer
- ``admission``   what is refused before it costs anything
- ``queue``       bounded, most urgent first
- ``placement``   which instance: a pure function of a registry snapshot
- ``dispatch``    from the queue to a lane, and what comes of it
- ``instances``   which Tritons there are, and how they are
- ``lanes``       few long-lived streams per Triton instance

``build`` wires them, ``lifecycle`` starts and ends them.

Beside them: ``tasks`` (the request itself: deadline, listeners, exactly one outcome),
``prediction`` (what work will take) and ``telemetry``. Imports run downwards only; ``make lint``
holds that.
"""
