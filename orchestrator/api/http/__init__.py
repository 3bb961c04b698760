"""Parts that every dialect uses.

Connections: ``connection`` (the server and its connections; detects hang-ups), ``accepting``
(limits the number of connections by open files and address).

Requests: ``context`` (facts about a request), ``browsers`` (web pages that may send requests),
``body`` (reads bodies within bounds; decodes large bodies on a thread), ``decode`` (JSON to a type;
``ignored``: unknown fields; ``field_errors``), ``deadlines`` (all headers and fields for
deadlines), ``fields`` (fields of every dialect's body) with ``grammars``, ``tools`` and ``images``.

Answers: ``responses`` (JSON, errors, headers; answers of one task), ``event_stream`` (server-sent
events), ``outputs`` (parses model output), ``finding`` (finds tasks by id, to show or cancel them).
"""
