"""``/v1/files`` and ``/v1/batches``, and lines as the live routes serve them."""
