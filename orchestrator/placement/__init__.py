"""Chooses the instance for a task (OR-6 to OR-9); its modules, in the order of the data.

- ``requirements``  what a task needs of an instance
- ``choose``        the pure choice over ``Candidate``s, and where conversations were
- ``policy``        an operator's own expression
- ``placer``        these over the registry as it is now
"""
