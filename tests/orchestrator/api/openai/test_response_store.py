"""What is kept of responses: bounded, and each key's own."""

from contextlib import suppress

import pytest

from orchestrator.api.openai.responses.store import ResponseStore, Stored
from orchestrator.errors import NotFound
from orchestrator.retention import Retention
from orchestrator.tasks.job import Message
from orchestrator.tasks.tools import ToolCall
from tests.support.clock import ManualClock

SAID = (Message("user", "hello"),)


def make_store(
    clock: ManualClock, most: int = 10, age_s: float = 60.0, size: int = 2**20
) -> ResponseStore:
    return ResponseStore(clock, Retention(keep_count=most, keep_s=age_s, keep_bytes=size))


def names(store: ResponseStore, key: str) -> set[str]:
    found = set()
    for name in map(str, range(10)):
        with suppress(NotFound):
            store.get(key, name)
            found.add(name)
    return found


def test_the_oldest_of_whoever_keeps_most_goes() -> None:
    store = make_store(ManualClock(), most=4)
    store.put("quiet", "0", Stored(b"{}", SAID))
    for n in range(1, 8):
        store.put("busy", str(n), Stored(b"{}", SAID))
    assert names(store, "quiet") == {"0"}
    assert names(store, "busy") == {"5", "6", "7"}
    assert len(store) == 4


def test_bytes_are_bounded_with_what_was_said() -> None:
    store = make_store(ManualClock(), size=10_000)
    for n in range(8):
        store.put("k", str(n), Stored(b"x" * 1000, (Message("user", "y" * 1000),)))
        assert store.kept().bytes <= 10_000
    kept = names(store, "k")
    assert 1 < len(kept) < 8 and max(kept) == "7" and len(kept) == len(store)
    store.put("k", "9", Stored(b"x" * 10_000, SAID))
    assert "9" not in names(store, "k") and len(store)


@pytest.mark.parametrize(
    "said",
    [
        Message("tool", "", call_id="x" * 1000),
        Message("tool", "", call_id="x", name="x" * 1000),
        Message("assistant", "", calls=(ToolCall("x" * 1000, "f", {}),)),
        Message("assistant", "", calls=(ToolCall("x", "f", {}),), reasoning="x" * 1000),
    ],
)
def test_all_texts_of_a_client_count(said: Message) -> None:
    """A template may leave them out, so that no context bounds them."""
    store = make_store(ManualClock(), size=2000)
    store.put("k", "1", Stored(b"{}", (said,)))
    assert store.kept().bytes > 1000


def test_age_and_deletion_leave_nothing() -> None:
    clock = ManualClock()
    store = make_store(clock)
    store.put("k", "1", Stored(b"{}", SAID))
    clock.advance(50.0)
    store.put("k", "2", Stored(b"{}", SAID))
    clock.advance(20.0)
    assert names(store, "k") == {"2"}
    store.delete("k", "2")
    assert (len(store), store.kept().bytes) == (0, 0)
    with pytest.raises(NotFound):
        store.delete("k", "2")


def test_a_store_of_nothing_keeps_nothing() -> None:
    store = make_store(ManualClock(), most=0)
    store.put("k", "1", Stored(b"{}", SAID))
    assert (len(store), store.kept().bytes) == (0, 0)


def test_another_orchestrator_has_the_same_response_from_its_copy() -> None:
    calls = (ToolCall("c1", "f", {"a": [1, {"b": None}]}, chars=9),)
    said = (*SAID, Message("assistant", "", calls=calls, reasoning="hm"))
    body = b'{"status": "completed", "output": []}'
    here, there = make_store(ManualClock()), make_store(ManualClock())
    here.put("k", "1", Stored(body, said, (Message("assistant", "well"),)))
    copier = here.copier("k", "1")
    assert copier is not None and here.copier("k", "2") is None
    there.adopt("k", "1", copier())
    assert there.get("k", "1") == here.get("k", "1")
    assert list(there.names()) == [("k", "1")]
    there.let_go("k", "1")
    assert (len(there), there.kept().bytes) == (0, 0)
