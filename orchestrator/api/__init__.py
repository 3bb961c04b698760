"""Dialects: thin layers that translate between HTTP and the service, without logic of their own.

- ``server``     the aiohttp application: routes and middleware; ``auth`` checks tokens
- ``http``       parts that every dialect uses
- ``native``     ``/v2/tasks``
- ``openai``     ``/v1``
- ``anthropic``  ``/v1/messages``
- ``operator``   ``/v2/instances``, ``/health``, ``/metrics``
"""
