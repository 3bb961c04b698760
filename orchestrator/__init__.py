"""The service in front of Triton: a request is one object that moves through named stages.

The folders are those stages, in this order:

- ``api``         dialects at the edge: native, OpenAI, health, metrics
- ``service``     takes a request through the stages
- ``prompts``     text and chats become token ids with the worker's own tokenizer
- ``admission`` refuses work before it costs anything
- ``queue``       bounded, most urgent first
- ``placement``   which instance: a pure function of a registry snapshot
- ``dispatch`` from the queue to a lane, to the end
- ``instances`` the Tritons and their state
- ``lanes``       few long-lived streams per Triton instance

``build`` wires them, ``lifecycle`` starts and ends them.

In addition: ``tasks`` (the request itself: deadline, listeners, exactly one outcome),
``prediction`` (how long work takes) and ``telemetry``. Imports run downwards only; ``make lint``
holds that.
"""
