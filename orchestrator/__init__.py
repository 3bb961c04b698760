"""The service in front of Triton: a request is one object that moves through named stages.

``parse → authenticate → admit → queue → place → dispatch → stream → settle``, in this order:

- ``api``        dialects at the edge: native, OpenAI, health, metrics
- ``tokens``     prompts become token ids with the worker's own tokenizer
- ``task``       the request: deadline, listeners, exactly one outcome
- ``gateway``    takes a request through the stages
- ``admission``  what is refused before it costs anything
- ``queue``      bounded, earliest deadline first
- ``placement``  which instance: a pure function of a registry snapshot
- ``dispatch``   a queued task becomes a flight on a lane
- ``lanes``      few long-lived streams per Triton instance
- ``stream``     server-sent events, written straight to the socket
- ``settle``     outcome, metrics, log line, journal
"""
