"""The table of docs/clients.md, which ``make test-clients`` writes."""

from tools.clients_page import PAGE, ClientRow, with_rows

TABLE = """\
Before.

| client | version | what is shown | result | on |
|---|---|---|---|---|
| `a` | 1 | chats | passed | 2026-01-01 |
| B | 1 | tools | passed | 2026-01-01 |

After | all.
"""


def test_rows_are_replaced_kept_and_added() -> None:
    rows = [
        ClientRow("B", "2", "tools", "**failed**", "2026-02-02"),
        ClientRow("C", "3", "edits", "passed", "2026-02-02"),
    ]
    assert with_rows(TABLE, rows).splitlines()[4:] == [
        "| `a` | 1 | chats | passed | 2026-01-01 |",
        "| B | 2 | tools | **failed** | 2026-02-02 |",
        "| C | 3 | edits | passed | 2026-02-02 |",
        "",
        "After | all.",
    ]
    assert with_rows(TABLE, []) == TABLE


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text("utf-8")
    assert with_rows(page, []) == page
