"""Errors that are rebuilt from what the journal has of them."""

from orchestrator.errors import NotReady, QueueFull, TidegateError, Unavailable, with_code
from protocol import Code
from tests.support.cases import for_each


@for_each(
    ("code", "kind", "status"),
    [
        (Code.NOT_READY, NotReady, 503),  # not 409, which the code is of a key in use, too
        (Code.NO_CAPACITY, Unavailable, 503),
        (Code.QUEUE_FULL, QueueFull, 429),
        ("a-later-code", TidegateError, 500),
    ],
)
def test_a_code_gives_the_error_back(code: str, kind: type[TidegateError], status: int) -> None:
    error = with_code(code, "told before")
    assert (type(error), error.status, str(error)) == (kind, status, "told before")
