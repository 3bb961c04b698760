"""Measured servers and baselines, each in its own processes.

- ``stack``          Tritons and an orchestrator on free loopback ports
- ``context``        the stack that a benchmark requests
- ``offer``          sends a load to a server, and waits until all of its work has ended
- ``scrape``         counters of ``/metrics`` before and after
- ``emitter``        the orchestrator's own event streams without Triton, and plain ones
- ``envoy``          an Envoy in front of pods
- ``store``          a Redis or Valkey
"""
