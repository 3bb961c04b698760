"""Benchmarks of Tidegate and how they are run: README.md next to this says what is where."""

SEED = 20240229
"""Seed of everything that is drawn at random."""
