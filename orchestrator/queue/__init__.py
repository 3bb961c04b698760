"""What waits: pure, no clock.

- ``task_queue``  least slack first, by class and tenant
- ``tiers``       safe and at risk, background × interactive, batch
- ``fair_share``  virtual time per tenant
- ``order``       what an operator may choose
"""
