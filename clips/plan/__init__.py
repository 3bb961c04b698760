"""Clips as both sides see them: the recipe that asks for one, its plan, and its time by stage.

- ``recipe``   what a client asks for, with its limits checked
- ``plan``     frames and bytes of the clip that a recipe makes, and what may be dropped
- ``budgets``  how long each stage may take, and what it took lately
"""
