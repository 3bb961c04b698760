"""The example of docs/extending.md: an order of the queue is a class of one method."""

import pytest

from catalog.paths import ROOT
from orchestrator.queue.order import ORDERS, QueueOrder, SlackOrder
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.settings import load_settings
from tests.examples.latest_first import LatestFirst
from tests.orchestrator.queue.test_task_queue import Item, item
from tests.support.cases import for_each


@for_each("is_added", [True, False])
def test_an_order_is_added_and_taken_away(is_added: bool) -> None:
    """The queue keeps tenants' shares, drops and bounds by itself, in any order."""
    queue: TaskQueue[Item] = TaskQueue(4, LatestFirst() if is_added else SlackOrder())
    for name, deadline in (("soon", 5.0), ("late", 50.0), ("middle", 20.0)):
        queue.push(item(name, deadline, tenant="a"))
    queue.check_integrity()
    names = [each.id for each in queue]
    assert names == (["late", "middle", "soon"] if is_added else ["soon", "middle", "late"])
    assert [each.id for each in queue.expired(10.0)] == ["soon"]


def test_every_order_that_can_be_set_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(ORDERS) == set(QueueOrder)
    setting = "TIDEGATE_QUEUE__ORDER"
    for order in QueueOrder:
        monkeypatch.setenv(setting, order.value)
        assert load_settings().queue.order is order
    assert setting in (ROOT / "docs" / "extending.md").read_text()
