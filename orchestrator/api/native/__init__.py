"""The native API: ``/v2/tasks``, ``/v2/sessions``, ``/v2/slots``."""
