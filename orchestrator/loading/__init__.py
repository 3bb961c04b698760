"""Decides which model an instance serves: swapped by an operator, or loaded on demand.

- ``swaps``   one swap at a time for each instance, its grace, and what came of it
- ``choice``  which instance is to load a model: pure
- ``demand``  requests for models that no instance serves yet
"""
