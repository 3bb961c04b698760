"""Batches: files of requests that run in the background. Each request has its own outcome.

``service.Batches`` is the interface for APIs. From bottom to top: ``records``, ``folder`` with the
outcomes of batches, ``lines`` (the requests of a batch), ``window`` (limits running lines), ``run``
(the life cycle of a batch). This package has no HTTP.
"""
