"""Refuses requests that cannot be served, before they cost anything.

- ``admission``      checks, in order: draining, deadline, context, placement, feasibility
- ``images``         limits on the number and size of a chat's images
- ``rate_limits``    limits per key and for all keys together
"""
