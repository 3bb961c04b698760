"""Benchmarks of Tidegate and how they are run: README.md beside this says what is where."""

SEED = 20240229
"""Seed of everything that is drawn at random."""
