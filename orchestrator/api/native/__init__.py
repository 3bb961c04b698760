"""The native API: ``/v2/tasks``, ``/v2/quote``."""
