"""Supervised units, each a ``supervise.ProcessUnit``."""
