"""Refuses requests that cannot be served, before they cost anything.

- ``admission``      in the order of the checks: draining, deadline, context, place, feasible
- ``images``         how many a chat may have, and how large they may be
- ``rate_limits``    per key and for all
"""
