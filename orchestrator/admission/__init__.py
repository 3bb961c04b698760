"""Refused before it costs anything.

- ``admission``    in the order of the checks: draining, deadline, context, feasible, room
- ``rate_limits``  per key and for all
- ``outlook``      when a newcomer would start, and what it is told
"""
