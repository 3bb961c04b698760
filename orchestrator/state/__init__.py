"""State that several orchestrators share, so that they act as one service (OR-18).

A Redis or Valkey server has the members (``members``), durable tasks and their owners (``tasks``),
tasks to take over (``takeover``), copies of sessions and responses (``items``), limits, shares of
slots, and the members' runs, sums and books (``exchange``). ``scripts`` has the atomic scripts that
change this state; ``connection`` has the names of keys. Nothing is loaded without
``TIDEGATE_STATE__URL``.

All other state stays with its orchestrator. Requests for it are forwarded there
(``orchestrator.state.forwarding``): every id begins with the tag of the orchestrator that made it
(``orchestrator.ids``).
"""
