"""What several orchestrators share, so that they serve as one (OR-18).

Everything is in a Redis or Valkey server: the members (``members``), durable tasks and their owners
(``tasks``), tasks to take over (``takeover``), copies of what clients keep (``items``), limits,
shares of slots, what members tell each other and the books (``exchange``). The atomic scripts that
change it are in ``scripts``, names in ``connection``. Nothing is loaded without
``TIDEGATE_STATE__URL``.

Everything else stays with its orchestrator, and requests for it are forwarded there
(``orchestrator.state.forwarding``): every id begins with the tag of the orchestrator that made it
(``orchestrator.ids``).
"""
