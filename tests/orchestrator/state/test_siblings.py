"""OR-18: processes that share a port. Whatever is asked of one of them, all of them answer for."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from catalog.paths import OWN_ADDRESS
from orchestrator.batches.extension import BatchRoom
from orchestrator.state.forwarding import FORWARDED_HEADER
from tests.orchestrator.conftest import OPERATOR, Service
from tests.orchestrator.state.conftest import Sharing, see_each_other
from tests.orchestrator.tasks.journal.conftest import task_of
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.rooms import room

PORT = 4711
"""The port that they say they share: each listens on one of its own here."""


async def two_of(
    sharing: Sharing, worker: FakeWorker, **changes: object
) -> tuple[Service, Service]:
    members = []
    for number in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(OWN_ADDRESS, f"127.0.0.1:{number}")
            members.append(await sharing.member(worker, port=PORT, **changes))
    one, two = members
    await see_each_other(one, two)
    return one, two


async def test_what_an_operator_says_to_one_process_all_have_heard(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one, two = await two_of(sharing, worker)
    worker.plan = lambda job: Plan(stall_at=1)
    await task_of(one, durable=False)
    await task_of(two, durable=False)
    instances = await one.ask("GET", "/v2/instances")
    assert [each["jobs"] for each in instances["instances"]] == [2]
    for service in (one, two):
        settings = service.parts.reloader.settings
        queue = settings.queue.model_copy(update={"max_waiting": 7})
        changed = settings.model_copy(update={"queue": queue})
        service.parts.reloader.load = lambda changed=changed: changed  # type: ignore[misc]
    reloaded = await one.ask("POST", "/admin/reload", headers=OPERATOR)
    assert reloaded == {"changed": ["queue.max_waiting"], "needs_restart": []}
    assert [each.orchestrator.queue.bound for each in (one, two)] == [7, 7]
    there = {"address": "127.0.0.1:9", "ttl_s": 60}
    await two.ask("POST", "/v2/instances", 201, json=there, headers=OPERATOR)
    assert all("127.0.0.1:9" in each.orchestrator.registry.instances for each in (one, two))
    grace = {"grace_ms": 60_000}
    state = await two.ask("POST", "/admin/drain", 202, json=grace, headers=OPERATOR)
    assert (state["status"], state["live_tasks"]) == ("draining", 2)
    assert [each.parts.health.status for each in (one, two)] == ["draining", "draining"]
    assert (await one.ask("POST", "/admin/undrain", headers=OPERATOR))["status"] == "serving"
    assert two.parts.health.status == "ready"


async def test_work_of_all_processes_is_listed_and_cancelled_by_its_correlation_id(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one, two = await two_of(sharing, worker)
    worker.plan = lambda job: Plan(stall_at=1)
    plan = {"X-Correlation-Id": "plan-9"}
    tasks = [
        await each.ask("POST", "/v2/tasks", 202, json={"prompt": "a"}, headers=plan)
        for each in (one, two)
    ]
    ids = [task["task_id"] for task in tasks]
    listed = await one.ask("GET", "/v2/tasks")
    assert [each["task_id"] for each in listed["tasks"]] == ids[::-1]  # the newest first
    listed = await two.ask("GET", "/v2/tasks?limit=1")
    assert [each["task_id"] for each in listed["tasks"]] == ids[1:] and listed["has_more"]
    answer = await two.ask("POST", "/v2/tasks/plan-9/cancel", 202)
    assert sorted(answer["task_ids"]) == sorted(ids)
    await one.until(lambda: not one.orchestrator.live_tasks and not two.orchestrator.live_tasks)
    await two.ask("POST", "/v2/tasks/nothing-of-the-kind/cancel", 404)


async def test_one_page_has_the_metrics_of_all_processes(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one, two = await two_of(sharing, worker)
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    page = await one.ask("GET", "/metrics", headers=accept)
    families = list(text_string_to_metric_families(page))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    members = {
        sample.labels["process"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "tidegate_state_members"
    }
    assert members == {"127.0.0.1:1": 2, "127.0.0.1:2": 2}
    own = await two.ask("GET", "/metrics", headers={FORWARDED_HEADER: "1"})
    assert 'process="127.0.0.1:1"' not in own


async def test_files_and_batches_are_in_one_process_and_then_in_another(
    sharing: Sharing, worker: FakeWorker, tmp_path: Path
) -> None:
    one, two = await two_of(sharing, worker, journal__path=tmp_path / "journal")
    lead = one.orchestrator.sharing.siblings.lead  # type: ignore[union-attr]
    await one.until(lambda: lead() == "")
    await two.until(lambda: bool(two.orchestrator.sharing.siblings.lead()))  # type: ignore[union-attr]
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": '
    line += b'"fake", "prompt": "hi", "max_tokens": 2}}\n'
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", line, filename="requests.jsonl")
    file = await two.ask("POST", "/v1/files", data=form)
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    batch = await two.ask("POST", "/v1/batches", json=body)
    at = f"/v1/batches/{batch['id']}"
    while (await two.ask("GET", at))["status"] != "completed":  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    batches = room(one.orchestrator, BatchRoom).batches
    assert batches is not None and room(two.orchestrator, BatchRoom).batches is not None
    await batches.close()  # as the kernel does it for a process that is killed
    own = two.orchestrator.sharing.siblings  # type: ignore[union-attr]
    await two.until(lambda: own.lead() == "")  # type: ignore[union-attr]
    assert (await two.ask("GET", at))["request_counts"]["completed"] == 1


async def test_what_is_asked_of_a_process_in_whose_place_another_is_may_be_taken_on(
    sharing: Sharing, worker: FakeWorker
) -> None:
    one = await sharing.member(worker)
    state = one.orchestrator.sharing
    assert state is not None
    path = f"/v2/tasks/{state.tasks.tag}{24 * '0'}"
    for tag, expected in (("0badcafe", 503), (state.tasks.tag, 404)):
        await one.ask("GET", path, expected, headers={FORWARDED_HEADER: tag})
