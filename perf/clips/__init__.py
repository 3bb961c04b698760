"""Clips on the real Triton: how long each takes, and whether anything grows.

- ``soak``     paced clips, cancels and mistakes; measures their times, and growth
- ``client``   one recipe and its outcome, with plain ``tritonclient``
"""
