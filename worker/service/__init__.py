"""Connects Triton and the engine: requests in, frames and plain responses out. No Triton imports.

- ``call``      one Triton request as plain data, and the handle that answers it
- ``lane``      the lane contract: many jobs on one stream, answered in frames
- ``plain_intake``  takes requests of Triton's vLLM contract; and answers them;
  ``plain_request`` reads them
- ``replies`` lanes and plain requests for the emitter
- ``emitter``   the one thread that owns every response sender
- ``failure``   ends the process of an engine that has failed or hung; ``swap`` its model's change
- ``access`` callers' tokens; ``drain`` the end of service
- ``worker``    the worker as a whole: start, accept, drain, stop
"""
