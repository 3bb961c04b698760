"""Checks the machine's requirements."""
