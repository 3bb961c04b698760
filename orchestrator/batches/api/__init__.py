"""``/v1/files`` and ``/v1/batches``. The handlers of the live routes serve the lines."""
