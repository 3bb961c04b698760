"""What is kept of responses, on top of what ``OwnedStore`` does (tests/orchestrator/tasks)."""

from orchestrator.api.openai.responses.store import ResponseStore, Stored
from orchestrator.retention import Retention
from orchestrator.tasks.job import Message, ToolCall
from tests.support.cases import for_each
from tests.support.clock import ManualClock

SAID = (Message("user", "hello"),)


def make_store() -> ResponseStore:
    return ResponseStore(ManualClock(), Retention(keep_count=10, keep_s=60.0, keep_bytes=2000))


@for_each(
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
    store = make_store()
    store.put("k", "1", Stored(b"{}", (said,)))
    assert store.kept().bytes > 1000


def test_another_orchestrator_has_the_same_response_from_its_copy() -> None:
    calls = (ToolCall("c1", "f", {"a": [1, {"b": None}]}, chars=9),)
    said = (*SAID, Message("assistant", "", calls=calls, reasoning="hm"))
    body = b'{"status": "completed", "output": []}'
    here, there = make_store(), make_store()
    here.put("k", "1", Stored(body, said, (Message("assistant", "well"),)))
    copier = here.copier("k", "1")
    assert copier is not None and here.copier("k", "2") is None
    there.adopt("k", "1", copier())
    assert there.get("k", "1") == here.get("k", "1")
    assert list(there.names()) == [("k", "1")]
    there.let_go("k", "1")
    assert (len(there), there.kept().bytes) == (0, 0)
