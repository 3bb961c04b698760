"""What a run of a large batch under kills calls right."""

from perf.chaos.batches import BatchFindings


def test_a_run_is_right_when_every_line_has_one_entry() -> None:
    assert BatchFindings(100, status="completed").is_right
    for wrong in (
        BatchFindings(100, status="expired"),
        BatchFindings(100, status="completed", missing=1),
        BatchFindings(100, status="completed", doubled=1),
        BatchFindings(100, status="completed", strange=1),
    ):
        assert not wrong.is_right


def test_memory_is_told_by_tenths_of_the_lines() -> None:
    found = BatchFindings(100, memory=[(0, 90.0), (9, 95.0), (10, 91.0), (55, 92.0), (100, 93.0)])
    assert found.memory_by_tenths() == [95.0, 91.0, 0.0, 0.0, 0.0, 92.0, 0.0, 0.0, 0.0, 93.0]
