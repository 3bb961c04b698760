"""Benchmarks of Tidegate; perf/README.md describes the modules and how to run them."""

SEED = 20240229
"""Seed of all random draws."""
