"""Batches: many requests in a file, run in the background, each with an outcome of its own.

``service.Batches`` is all that an API needs. From bottom to top: ``frames`` (files that survive a
kill), ``records``, ``folder``, ``lines`` (the requests of a batch), ``ledger`` (their outcomes),
``window`` (how many lines run at once), ``run`` (one batch's life). No HTTP here.
"""
