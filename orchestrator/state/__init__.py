"""What several orchestrators share, so that they serve as one (OR-18).

Everything is in a Redis or Valkey server that exists already: who is there (``members``), durable
tasks and who holds each (``tasks``), whose tasks are to be taken on (``takeover``), copies of what
clients keep (``items``), limits, shares of slots, drains, runs, and what was learnt. The scripts
that change it, each at once, are in ``scripts``; names and connections in ``connection``. Without
``TIDEGATE_STATE__URL`` nothing of this is loaded.

What is not shared stays with the orchestrator that has it, and requests for it are handed on there
(``orchestrator.api.http.forwarding``): every id begins with the tag of the orchestrator that made
it (``orchestrator.ids``).
"""
