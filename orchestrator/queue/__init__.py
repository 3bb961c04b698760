"""The queue of waiting tasks: pure, no clock.

- ``task_queue``  least slack first, by class and tenant
- ``order``       what an operator may choose
"""
