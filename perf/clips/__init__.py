"""The slot pipeline, measured beside a naive one that has the same providers.

- ``rig``           ours on the real Triton and two naive servers, which take turns
- ``throughput``    clips per minute, latency, stage times, memory
- ``soak``          an hour of clips, cancels and mistakes: does anything grow?
- ``naive``         the pipeline of an afternoon, and ``naive_server``, which serves it
- ``client``        one recipe and what became of it, by plain ``tritonclient``
- ``stack``         a Triton with the slot model
"""
