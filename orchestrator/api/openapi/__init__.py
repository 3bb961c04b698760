"""``/openapi.json``: what every route of the service takes and gives."""
