"""``make chaos``: processes die, stand still and are replaced under load; then the books.

- ``world``    Tritons and orchestrators, and what can happen to them
- ``clients``  durable, resumed, streaming and plain requests, all of which know what they must get
- ``books``    what has to hold afterwards
- ``soak``     ``make soak``: an hour in which nothing happens but the clients of ``trouble``
"""
