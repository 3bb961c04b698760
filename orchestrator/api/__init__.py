"""Dialects: thin translations between HTTP and the service, none with logic of its own.

- ``server``     the aiohttp application: routes and middleware; ``auth`` checks tokens
- ``http``       what every dialect is made of
- ``native``     ``/v2/tasks``
- ``openai``     ``/v1``
- ``anthropic``  ``/v1/messages``
- ``operator``   ``/v2/instances``, ``/health``, ``/metrics``
"""
