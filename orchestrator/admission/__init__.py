"""Refuses requests that cannot be served, before they cost anything.

- ``admission``      in the order of the checks: draining, deadline, context, place, feasible
- ``context_limit``  how much a task may generate
- ``rate_limits``    per key and for all
"""
