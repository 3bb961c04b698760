"""``/openapi.json``: the requests and answers of every route of the service."""
