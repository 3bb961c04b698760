"""Metrics of the journal."""

from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.telemetry.metrics import Row

JOURNAL: tuple[Row[DurableTasks], ...] = (
    Row(
        "gauge",
        "journal_failing",
        "bool",
        "1 while the journal cannot be written, and durable tasks are refused",
        lambda durable: bool(durable.fault),
    ),
    Row("gauge", "journal_live", "tasks", "Durable tasks that have not ended", lambda d: d.live),
    Row(
        "gauge",
        "journal_left",
        "tasks",
        "Durable tasks that a drain has left to the next process, which tells what they come to",
        lambda durable: durable.left,
    ),
    Row(
        "gauge",
        "journal_unwritten",
        "records",
        "Promised records that wait for the disk",
        lambda durable: durable.unwritten,
    ),
    Row(
        "counter",
        "journal_lost",
        "tasks",
        "Tasks that another orchestrator has taken on while this one stood still; "
        "those that had ended here too (ended) are in the outcomes of both",
        lambda durable: [(("live",), durable.lost), (("ended",), durable.outdone)],
        ("stage",),
    ),
    Row("counter", "journal_commits", "transactions", "Transactions", lambda d: d.commits),
    Row("counter", "journal_records", "records", "Records in them", lambda d: d.records),
    Row(
        "counter",
        "journal_recovered",
        "tasks",
        "Tasks of an earlier process, by what was done with them at the start",
        lambda durable: [((how,), count) for how, count in durable.recovered.items()],
        ("how",),
    ),
)
