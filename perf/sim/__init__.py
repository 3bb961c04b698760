"""Simulates hours of load in seconds: the real orchestrator and real workers on a virtual clock.

Only the layers around and below them are missing: HTTP and gRPC, Triton and the model. The package
``replay`` has the worker on virtual time, its lane, and the clock.

- ``__main__``   compares policies (``campaign``: ``scenes`` and ``rivals``), or runs a ``study``
- ``simulate``   sends arrivals through orchestrators and workers, and records the outcomes
- ``arrivals``   random arrivals, sizes and tenants
- ``campaign_report``   report of a campaign
- ``runs``       runs of calls under one deadline
- ``quotes``     accuracy of quoted chances
- ``reported``   accuracy of other predictions for clients
- ``counterfactual``  finds wrong refusals
"""
