"""Goodput under overload: the benefit of deadlines, by policy (``make bench-goodput``).

- ``load``      the requests: sizes, arrivals, deadlines
- ``policies``  the compared policies, as settings of one orchestrator
- ``front``     an orchestrator with a policy, and its load
"""
