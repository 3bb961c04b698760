"""The service in front of Triton. A request is one object that moves through named stages.

The folders are those stages, in this order:

- ``api``         dialects at the edge: native, OpenAI, health, metrics
- ``service``     moves a request through the stages
- ``prompts``     encodes text and chats with the worker's own tokenizer
- ``admission`` refuses work before it costs anything
- ``queue``       bounded, most urgent first
- ``placement``   chooses an instance: a pure function of a registry snapshot
- ``dispatch`` from the queue to a lane, to the end
- ``instances`` the Tritons and their state
- ``lanes``       a few long-lived streams per Triton instance

``build`` wires them, ``lifecycle`` starts and ends them.

In addition: ``tasks`` (the request itself: deadline, listeners, exactly one outcome),
``prediction`` (the time that work takes) and ``telemetry``. Imports run only downwards; ``make
lint`` checks this.
"""
