"""Logs, metrics and trace contexts."""
