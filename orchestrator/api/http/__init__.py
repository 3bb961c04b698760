"""Parts that every dialect uses.

A connection: ``connection`` makes and is one, and notices hang-ups; ``accepting`` bounds how many
there are, by open files and address.

A request: ``context`` (its facts), ``browsers`` (which web pages may ask), ``body`` (read within
bounds, large ones on a thread), ``decode`` (JSON to a type; ``ignored``: unknown fields),
``deadlines`` (in every spelling), ``fields`` (what every dialect's body may say) with ``grammars``,
``tools`` and ``images``.

An answer: ``responses`` (JSON, errors, headers; of a request that is one task), ``event_stream``
(server-sent events), ``outputs`` (the model's output), ``finding`` (tasks by id, to show or cancel
them).
"""
