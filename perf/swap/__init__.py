"""Benchmark of swaps: the cost of giving a worker another model."""
