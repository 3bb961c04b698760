"""Hours of load in seconds: the real orchestrator and the real workers under a virtual clock.

Only what is around and beneath them is not there: HTTP and gRPC, Triton and the model. The worker
on virtual time, the way to it and the clock are ``replay``'s.

- ``__main__``   one policy after the other, or the ``campaign``: ``scenes`` and ``rivals``
- ``simulate``   arrivals through orchestrator and workers, and what became of each
- ``arrivals``   who asks for what, and when
- ``summary``    goodput and the like of a run; ``campaign_report``, ``plot``
- ``chains``     runs of calls under one deadline
- ``reported``   what clients are told, beside what comes of it
- ``counterfactual``  which refusals were wrong
- ``what_if``    what alone would have met a request that missed, by what a service recorded

    python -m perf.sim [--minutes 3] [--loads 0.5 1 2] [--seed N]
"""
