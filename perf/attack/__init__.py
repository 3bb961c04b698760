"""Attacks from outside on a running service, and what must hold after each."""
