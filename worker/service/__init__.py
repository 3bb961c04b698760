"""Between Triton and the engine: requests in, frames and plain responses out. No Triton imports.

- ``call``      one Triton request as plain data, and the handle that answers it
- ``lane``      the lane contract: many jobs on one stream, answered in frames
- ``plain_request``  the contract of Triton's vLLM backend, request by request
- ``emitter``   the one thread that owns every response sender
- ``worker``    the worker as a whole: start, accept, drain, stop
"""
