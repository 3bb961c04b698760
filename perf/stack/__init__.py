"""Servers that are measured or compared with, each in processes of its own.

- ``stack``          Tritons and an orchestrator on free loopback ports
- ``context``        the stack that a benchmark asks for
- ``offer``          a load through a server, until it has nothing left of it
- ``scrape``         counters of ``/metrics`` before and after
- ``emitter``        the orchestrator's own event streams without Triton, and plain ones
- ``envoy``          an Envoy in front of pods
- ``store``          a Redis or Valkey
"""
