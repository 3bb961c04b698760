"""The queue of waiting tasks: pure, no clock.

- ``task_queue``  least slack first, by class and tenant
- ``tiers``       interactive before batch, background after both
- ``order``       what an operator may choose
"""
