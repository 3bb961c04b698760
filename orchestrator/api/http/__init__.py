"""What every dialect is made of.

A connection: ``runner`` makes them, ``connection`` is one, with ``connection_limit`` (how many),
``accepting`` (as open files allow), ``hang_ups`` (who has hung up, and who has said all) and
``losses`` (many of them at once).
``unhandled`` answers what never becomes a request.

A request: ``context`` (what is known of it), ``browsers`` (which web pages may ask), ``body`` (read
within ``body_budget``, large ones on the thread of ``large_bodies``), ``decode`` (JSON to a type),
``deadlines`` (in every spelling), ``fields`` (what every dialect's body may say).

An answer: ``responses`` (JSON, errors, headers), ``answer_ids`` (what it is called),
``event_stream`` (server-sent events), ``one_answer`` (of a request that is one task).
"""
