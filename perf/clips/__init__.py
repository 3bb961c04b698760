"""Clips on the real Triton: how long each takes, and whether anything grows.

- ``soak``     paced clips, cancels and mistakes; what they take, and what is left behind
- ``client``   one recipe and its outcome, by plain ``tritonclient``
"""
