"""Goodput under overload: the worth of a deadline, policy by policy (``make bench-goodput``).

- ``load``      the requests: sizes, arrivals, deadlines
- ``policies``  what is compared: settings of one orchestrator
- ``front``     an orchestrator of a policy, and a load through it
"""
