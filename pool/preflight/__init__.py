"""Checks what the machine must have."""
