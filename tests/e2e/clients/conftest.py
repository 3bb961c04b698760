"""Writes what a run has shown of each client, for the table in docs/clients.md."""

import json
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from catalog.paths import ROOT

RESULTS = ROOT / "build" / "clients.json"
"""A list of rows as ``python -m tools.clients_page`` takes them."""
Report = Callable[[str, str, str], None]

_rows: dict[str, dict[str, str]] = {}


@pytest.fixture
def shown(record_property: Callable[[str, object], None]) -> Report:
    """Call it with a client's name, what is shown of it and its version before anything can fail:
    the test's outcome is its result."""

    def note(client: str, shows: str, version: str) -> None:
        record_property("client", {"client": client, "version": version, "shows": shows})

    return note


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    row: dict[str, str] | None = dict(report.user_properties).get("client")  # type: ignore[assignment]
    if row is None or report.when != "call":
        return
    result = "passed" if report.passed else f"**{report.outcome}**"
    today = datetime.now(UTC).date().isoformat()
    _rows[row["client"]] = {**row, "result": result, "date": today}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(list(_rows.values()), indent=1, ensure_ascii=False) + "\n")
