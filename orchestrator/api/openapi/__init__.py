"""``/openapi.json``: the requests and responses of every route of the service."""
