"""The queue of waiting tasks: pure, no clock.

- ``task_queue``  least slack first, by class and tenant
- ``order``       orders that an operator may choose
"""
