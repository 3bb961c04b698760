"""Goodput under overload: the worth of a deadline, policy beside policy (``make bench-goodput``).

- ``load``      the requests: sizes, arrivals, deadlines
- ``policies``  what is compared: settings of one orchestrator
- ``cell``      one policy at one load: figures and a row of the table
- ``offer``     a load through one orchestrator
- ``plot``      the picture
- ``rows``      a command of its own: how many rows run at once
"""
