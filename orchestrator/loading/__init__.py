"""Decides which model an instance serves: an operator swaps it, or a request loads it.

- ``swaps`` one swap at a time per instance, its grace and result
- ``choice`` which instance loads a model: pure
- ``demand``  requests for models that no instance serves yet
"""
