"""Has the certificates that the system trusts read by the first connection that needs them.

aiohttp reads them twice as it is imported, which takes a tenth of the orchestrator's start. Most
orchestrators make no connection over TLS with that library.
"""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _ReadsLater(ssl.SSLContext):
    """A context that trusts nobody yet, and becomes an ordinary one when it is first used."""

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return _ordinary(self).wrap_bio(*args, **options)

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        return _ordinary(self).wrap_socket(*args, **options)


def _ordinary(context: ssl.SSLContext) -> ssl.SSLContext:
    context.__class__ = ssl.SSLContext
    context.set_default_verify_paths()
    return context


def _later(context: ssl.SSLContext) -> None:
    context.__class__ = _ReadsLater


@contextmanager
def read_later() -> Iterator[None]:
    """Contexts that are made in the block read the system's certificates when they are used."""
    ssl.SSLContext.set_default_verify_paths = _later  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        del ssl.SSLContext.set_default_verify_paths  # the one of its parent is found again


with read_later():
    import aiohttp.connector  # noqa: F401
