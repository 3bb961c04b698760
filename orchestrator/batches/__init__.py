"""Batches: many requests in a file, run in the background, each with an outcome of its own.

``service.Batches`` is all that an API needs. From bottom to top: ``records``, ``folder`` with each
batch's outcomes, ``lines`` (its requests), ``window`` (how many run at once), ``run`` (one batch's
life). No HTTP here.
"""
