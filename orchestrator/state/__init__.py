"""State that several orchestrators share, so that they act as one service (OR-18).

A Redis or Valkey server has the members, their durable tasks and who owns them, copies of sessions
and responses, limits, shares of slots, runs, sums and books. Nothing is loaded without
``TIDEGATE_STATE__URL``.

All other state stays with its orchestrator. Requests for it are forwarded there (``forwarding``):
every id begins with the tag of the orchestrator that made it (``orchestrator.ids``).
"""
