"""What every dialect is made of.

A connection: ``connection`` makes and is one, with ``accepting`` (how many, as open files allow)
and ``hang_ups`` (who has hung up, and who has said all).

A request: ``context`` (what is known of it), ``browsers`` (which web pages may ask), ``body`` (read
within bounds, large ones on a thread), ``decode`` (JSON to a type; ``ignored``: what means nothing
here), ``deadlines`` (in every spelling), ``fields`` (what every dialect's body may say) with
``grammars``, ``tools`` and ``images``.

An answer: ``responses`` (JSON, errors, headers; of a request that is one task), ``event_stream``
(server-sent events), ``outputs`` (what the model wrote), ``finding`` (tasks by id, to tell of them
or cancel them).
"""
