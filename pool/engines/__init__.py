"""Finds or makes the engines of this machine, and starts a Triton server."""
