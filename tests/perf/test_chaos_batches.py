"""What a run of batches under kills calls right, and when it strikes."""

from perf.chaos.batches import BatchOrder, Sent
from tests.support.cases import for_each

ORDER = BatchOrder("a", 4, refused_every=4)
ENTRIES = [("a-1", "succeeded"), ("a-2", "succeeded"), ("a-3", "succeeded"), ("a-4", "errored")]
STATE = {
    "status": "completed",
    "request_counts": {"total": 4, "completed": 3, "failed": 1},
    "errors": None,
}


def test_a_batch_is_right_when_every_line_has_the_one_entry_that_it_must_have() -> None:
    sent = Sent(ORDER, "batch_1", "file-1", STATE)
    sent.judge(iter(ENTRIES))
    assert sent.faults == []


@for_each(
    ("entries", "faults"),
    [
        (ENTRIES[1:], ["1 lines are missing", "its counts are"]),
        ([*ENTRIES, ENTRIES[0]], ["1 lines are doubled", "its counts are"]),
        ([*ENTRIES, ("b-1", "succeeded")], ["the line 'b-1' is succeeded, not None", "its counts"]),
        ([*ENTRIES[:3], ("a-4", "succeeded")], ["'a-4' is succeeded, not errored", "its counts"]),
        ([("a-1", "expired"), *ENTRIES[1:]], ["'a-1' is expired", "its counts"]),
    ],
)
def test_what_is_wrong_with_a_batch_is_said(
    entries: list[tuple[str, str]], faults: list[str]
) -> None:
    sent = Sent(ORDER, "batch_1", "file-1", STATE)
    sent.judge(iter(entries))
    assert len(sent.faults) == len(faults)
    assert all(part in fault for part, fault in zip(faults, sent.faults, strict=True))
