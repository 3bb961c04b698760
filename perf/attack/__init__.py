"""Attacks from outside on a running service, and the books that must balance after each."""
