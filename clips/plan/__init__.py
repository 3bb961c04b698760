"""Code for clips that orchestrator and worker share: recipe, plan, and times of the stages.

- ``recipe``   a client's request, with its limits checked
- ``plan``     frames and bytes of a recipe's clip, and the parts that may be dropped
- ``budgets``  time limits of the stages, and their recent times
"""
