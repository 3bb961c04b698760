"""Chooses the instance for a task (OR-6 to OR-9); its modules, in the order of the data.

- ``requirements``  the properties that a task needs of an instance
- ``choose``        the pure choice among ``Candidate``s, and conversations' instances
- ``policy``        the operator's placement expression
- ``placer``        applies these to the present registry
"""
