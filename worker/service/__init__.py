"""Connects Triton and the engine: requests in, frames and plain responses out. No Triton imports.

- ``call``          one Triton request as plain data, and the handle that answers it
- ``lane``          the lane contract: many jobs on one stream, answered in frames
- ``plain_intake``  takes and answers requests of Triton's vLLM contract
- ``plain_request`` parses these requests
- ``replies``       the emitter's view of lanes and plain requests
- ``emitter``       the one thread that owns every response sender
- ``failure``       ends the process of a failed or hung engine; ``swap`` replaces its model
- ``access``        checks callers' tokens; ``drain`` ends the service
- ``worker``        the worker as a whole: start, accept, drain, stop
"""
