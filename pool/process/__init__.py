"""Runs and finds single processes; their logs and ports."""
