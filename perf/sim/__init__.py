"""Hours of load in seconds: the real orchestrator and the real workers under a virtual clock.

Only what is around and beneath them is not there: HTTP and gRPC, Triton and the model. The worker
on virtual time, the way to it and the clock are ``replay``'s.

- ``__main__``   policies compared (``campaign``: ``scenes`` and ``rivals``), or a ``study``
- ``simulate``   arrivals through orchestrators and workers, and the outcome of each
- ``arrivals``   who asks for what, and when
- ``campaign_report``   what is shown of a campaign
- ``runs``       runs of calls under one deadline
- ``quotes``     chances that were told, and what came of it
- ``reported``   what else clients are told, and what comes of it
- ``counterfactual``  which refusals were wrong
"""
