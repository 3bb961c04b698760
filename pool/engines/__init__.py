"""Finds or installs the engines of this machine, and starts a Triton server."""
