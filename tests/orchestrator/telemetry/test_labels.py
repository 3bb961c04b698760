"""What clients choose makes a bounded number of time series."""

from orchestrator.telemetry.metrics import OTHER, BoundedValues


def test_the_first_values_stay_themselves() -> None:
    values = BoundedValues(2)
    assert [values.of(v) for v in ("a", "b", "c", "a", "d", "b")] == [
        "a",
        "b",
        OTHER,
        "a",
        OTHER,
        "b",
    ]
