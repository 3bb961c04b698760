"""``/v1/files`` and ``/v1/batches`` with the official SDK, in front of a worker, over restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.api.http import body as bodies
from orchestrator.tasks.job import Priority
from tests.orchestrator.api.asking import CHAT as PARAMS
from tests.orchestrator.conftest import MakeService, MakeWorker, Service, bearer
from tests.orchestrator.tasks.journal.conftest import Restarts
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.lazy import openai

CHAT = "/v1/chat/completions"
KEYS = {"one": {"token": "token-one"}, "two": {"token": "token-two"}}


@pytest.fixture
def restarts(make_service: MakeService, tmp_path: Path) -> Restarts:
    return Restarts(make_service, tmp_path)


@pytest.fixture
async def service(restarts: Restarts, worker: FakeWorker) -> Service:
    """It has a journal."""
    return await restarts.start(worker)


def lines_of(*bodies: Any, url: str = CHAT) -> bytes:
    lines = [
        {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies, 1)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def upload(service: Service, content: bytes, token: str = "") -> Any:
    form = aiohttp.FormData()
    form.add_field("file", content, filename="requests.jsonl")
    form.add_field("purpose", "batch")
    return await ask(service, "POST", "/v1/files", token=token, data=form)


async def ask(
    service: Service, method: str, path: str, status: int = 200, token: str = "", **sent: Any
) -> Any:
    headers = bearer(token) | sent.pop("headers", {})
    return await service.ask(method, path, status, headers=headers, **sent)


async def create(service: Service, content: bytes, token: str = "", **changes: object) -> str:
    file = await upload(service, content, token)
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"} | changes
    batch = await ask(service, "POST", "/v1/batches", token=token, json=body)
    return str(batch["id"])


async def over(service: Service, name: str, token: str = "") -> Any:
    ended = ("completed", "failed", "expired", "cancelled")
    while True:
        batch = await ask(service, "GET", f"/v1/batches/{name}", token=token)
        if batch["status"] in ended:
            return batch
        await asyncio.sleep(0.01)


async def content_of(service: Service, name: str | None, token: str = "") -> list[Any]:
    if name is None:
        return []
    content = await service.ask("GET", f"/v1/files/{name}/content", headers=bearer(token))
    return [json.loads(line) for line in content.splitlines()]


async def entries_of(service: Service, batch: Any) -> dict[str, Any]:
    """By ``custom_id``; there is one for each."""
    found = [
        *await content_of(service, batch["output_file_id"]),
        *await content_of(service, batch["error_file_id"]),
    ]
    assert len({entry["id"] for entry in found}) == len(found)
    by_id = {entry["custom_id"]: entry for entry in found}
    assert len(by_id) == len(found)
    return by_id


async def test_a_batch_with_the_sdk(service: Service, sdk: openai.AsyncOpenAI) -> None:
    bad = PARAMS | {"max_tokens": -1}
    content = lines_of(PARAMS, bad, PARAMS | {"stream": True}, PARAMS | {"model": "strange"})
    file = await sdk.files.create(file=("mine.jsonl", content), purpose="batch")
    assert (file.filename, file.purpose, file.bytes) == ("mine.jsonl", "batch", len(content))
    batch = await sdk.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"night": "1"},
    )
    assert batch.status == "validating" and batch.expires_at == batch.created_at + 86_400
    await over(service, batch.id)
    batch = await sdk.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.metadata == {"night": "1"}
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 1, 3)
    assert batch.output_file_id and batch.error_file_id
    (told,) = (await sdk.files.content(batch.output_file_id)).text.splitlines()
    entry = json.loads(told)
    assert (entry["custom_id"], entry["error"]) == ("id-1", None)
    assert entry["response"]["status_code"] == 200 and entry["response"]["request_id"]
    answer = entry["response"]["body"]
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "w0 w1 w2 w3 "
    errors = await content_of(service, batch.error_file_id)
    found = {e["custom_id"]: e["response"] for e in errors}
    assert {name: one["status_code"] for name, one in found.items()} == {
        "id-2": 400,
        "id-3": 400,
        "id-4": 404,
    }
    assert found["id-3"]["body"]["error"]["param"] == "stream"
    assert found["id-4"]["body"]["error"]["code"] == "model_not_found"
    # lists and deletion
    assert [one.id for one in (await sdk.batches.list()).data] == [batch.id]
    assert {one.id async for one in sdk.files.list()} == {
        file.id,
        batch.output_file_id,
        batch.error_file_id,
    }
    assert [one.id async for one in sdk.files.list(purpose="batch")] == [file.id]
    assert (await sdk.files.content(file.id)).content == content
    assert (await sdk.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await sdk.files.retrieve(file.id)


async def test_every_endpoint_answers_as_it_does_alone(service: Service) -> None:
    for url, body, object_ in (
        ("/v1/completions", {"model": "fake", "prompt": "hi", "max_tokens": 3}, "text_completion"),
        ("/v1/responses", {"model": "fake", "input": "hi"}, "response"),
    ):
        batch = await over(service, await create(service, lines_of(body, url=url), endpoint=url))
        assert batch["status"] == "completed", batch
        (entry,) = (await entries_of(service, batch)).values()
        live = await ask(service, "POST", url, json=body)
        answer = entry["response"]["body"]
        assert entry["response"]["status_code"] == 200 and answer.get("object") == object_
        assert set(answer) == set(live)


async def test_lines_are_batch_work_with_the_batchs_deadline(
    service: Service, worker: FakeWorker
) -> None:
    """Their own, where it is sooner."""
    jobs = []
    service.orchestrator.on_offered.append(lambda task: jobs.append(task.job))
    await over(service, await create(service, lines_of(PARAMS, PARAMS | {"deadline_ms": 60_000})))
    left = sorted(job.deadline.at - service.orchestrator.clock.now() for job in jobs)
    assert {job.priority for job in jobs} == {Priority.BATCH}
    assert left[0] < 61 and 86_000 < left[1] <= 86_400


async def test_expiry_and_cancellation_say_so_of_each_line(
    service: Service, worker: FakeWorker
) -> None:
    worker.does(Plan(stall_at=1))
    name = await create(service, lines_of(*[PARAMS] * 3), completion_window="1h")
    await service.until_tokens(1, tasks=3)
    await ask(service, "POST", f"/v1/batches/{name}/cancel")
    batch = await over(service, name)
    assert batch["status"] == "cancelled" and batch["cancelling_at"] and batch["cancelled_at"]
    assert batch["request_counts"] == {"total": 3, "completed": 0, "failed": 3}
    codes = {e["error"]["code"] for e in (await entries_of(service, batch)).values()}
    assert codes == {"batch_cancelled"}
    await service.until(lambda: service.outcomes() == ["aborted"] * 3)
    name = await create(service, lines_of(*[PARAMS] * 3), completion_window="20s")
    await service.until_tokens(1, tasks=3)
    service.leap(21)
    batch = await over(service, name)
    assert batch["status"] == "expired"
    entries = await entries_of(service, batch)
    assert {e["error"]["code"] for e in entries.values()} == {"batch_expired"}
    assert len(entries) == 3


@for_each(
    ("changes", "said"),
    [
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"endpoint": "/v1/embeddings"}, "endpoint must be one of"),
        ({"metadata": {"a": "b" * 9217}}, "metadata"),
    ],
)
async def test_what_a_batch_cannot_be_is_refused(
    service: Service, changes: dict[str, object], said: str
) -> None:
    file = await upload(service, lines_of(PARAMS))
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    error = await ask(service, "POST", "/v1/batches", 400, json=body | changes)
    assert said in error["error"]["message"]


async def test_uploads_that_are_none_are_refused(service: Service) -> None:
    def form(**fields: str) -> aiohttp.FormData:
        data = aiohttp.FormData()
        for name, value in fields.items():
            data.add_field(name, value, content_type="text/plain")
        return data

    for data, status, said in (
        (form(purpose="batch"), 415, "multipart"),
        (form(file="{}", purpose="assistants"), 400, "purpose must be batch"),
        (form(file="{}"), 400, "purpose must be batch"),
        (form(other="{}", purpose="batch"), 400, "file is missing"),
        (form(**{f"f{n}": "x" for n in range(20)}), 400, "more than 16 parts"),
    ):
        sent = {"json": {}} if status == 415 else {"data": data}
        error = await ask(service, "POST", "/v1/files", status, **sent)
        assert said in error["error"]["message"]
    assert (await ask(service, "GET", "/v1/files"))["data"] == []


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
SECRET = b"SECRET"
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


def part(*headers: bytes, content: bytes = b"{}") -> bytes:
    return b"--b\r\n" + b"".join(h + b"\r\n" for h in headers) + b"\r\n" + content + b"\r\n"


NAMED = b'Content-Disposition: form-data; name="file"'
BENT = {
    "a header with NUL": part(NAMED, b"X: SEC\x00RET"),
    "too many headers": part(NAMED, *(b"X%d: SECRET" % n for n in range(200))),
    "a line in front without end": 50_000 * SECRET,
    "no boundary at all": SECRET,
    "an end in the middle": PURPOSE + b"--b\r\n" + NAMED + b"\r\n\r\nSECRET",
    "an unknown charset": part(b"Content-Disposition: form-data; name*=SECRET''file"),
    "a disposition that is none": part(b"Content-Disposition: \x22SECRET\x22; ;;=="),
    "a charset that is no text": part(
        b'Content-Disposition: form-data; name="_charset_"', content=b"\xff\xfe"
    ),
    "parts in a part": part(NAMED, b"Content-Type: multipart/mixed; boundary=SECRET"),
}


@for_each("case", BENT.values())
async def test_a_bent_upload_is_the_clients_to_mend_and_is_quoted_nowhere(
    case: bytes, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    error = await ask(service, "POST", "/v1/files", 400, data=case + b"--b--\r\n", headers=FORM)
    assert "SECRET" not in error["error"]["message"]
    assert "SECRET" not in caplog.text and "Traceback" not in caplog.text
    assert (await ask(service, "GET", "/v1/files"))["data"] == []


async def test_an_upload_that_drips_ends_as_any_body(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is counted over all of its pieces."""
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.2)
    ended = asyncio.Event()

    async def drip() -> AsyncIterator[bytes]:
        yield PURPOSE + b"--b\r\n" + NAMED + b"\r\n\r\n"
        while not ended.is_set():
            yield b"x"
            await asyncio.sleep(0.01)

    async with service.http.post("/v1/files", data=drip(), headers=FORM) as response:
        ended.set()
        assert response.status == 408
        assert "the body arrived too slowly" in (await response.json())["error"]["message"]


async def test_a_key_sees_its_own_files_and_batches_only(
    restarts: Restarts, worker: FakeWorker
) -> None:
    service = await restarts.start(worker, keys=KEYS)
    name = await create(service, lines_of(PARAMS), "token-one")
    batch = await over(service, name, "token-one")
    assert batch["request_counts"]["completed"] == 1
    file, output = batch["input_file_id"], batch["output_file_id"]
    for method, path in (
        ("GET", f"/v1/files/{file}"),
        ("GET", f"/v1/files/{output}/content"),
        ("DELETE", f"/v1/files/{file}"),
        ("GET", f"/v1/batches/{name}"),
        ("POST", f"/v1/batches/{name}/cancel"),
    ):
        await ask(service, method, path, 404, "token-two")
    for path in ("/v1/files", "/v1/batches"):
        assert (await ask(service, "GET", path, token="token-two"))["data"] == []
        assert (await ask(service, "GET", path, token="token-one"))["data"]
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "1h"}
    await ask(service, "POST", "/v1/batches", 404, "token-two", json=body)


async def test_half_of_a_keys_places_stay_for_its_other_requests(
    restarts: Restarts, worker: FakeWorker
) -> None:
    plan = worker.does(Plan(stall_at=1))
    service = await restarts.start(worker, keys={"one": KEYS["one"] | {"concurrent": 4}})
    name = await create(service, lines_of(*[PARAMS] * 6), "token-one")
    await service.until_tokens(1, tasks=2)
    await asyncio.sleep(0.05)
    assert service.metric("tidegate_batch_lines_under_way") == 2
    plan.release.set()
    assert (await over(service, name, "token-one"))["status"] == "completed"


async def test_without_a_journal_it_says_which_setting_is_missing(
    make_service: MakeService, worker: FakeWorker
) -> None:
    service = await make_service(worker)
    for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches")):
        error = await ask(service, method, path, 400)
        assert "TIDEGATE_JOURNAL__PATH" in error["error"]["message"]


async def test_bodies_may_be_larger_than_a_requests_and_their_parts_not(
    restarts: Restarts, worker: FakeWorker
) -> None:
    service = await restarts.start(worker, http__max_body_bytes=1024)
    batch = await over(service, await create(service, lines_of(*[PARAMS] * 20)))
    assert batch["request_counts"]["completed"] == 20
    long = PARAMS | {"messages": [{"role": "user", "content": "x" * 1024}]}
    batch = await over(service, await create(service, lines_of(PARAMS, long)))
    assert [(e["code"], e["line"]) for e in batch["errors"]["data"]] == [("line_too_long", 2)]


async def test_a_line_waits_for_an_instance_that_is_not_reached_yet(
    restarts: Restarts, worker: FakeWorker, make_worker: MakeWorker
) -> None:
    """After a restart of all, who serves its model may be the last to come."""
    late = await make_worker(model="late")
    port = int(late.address.rpartition(":")[2])
    await late.stop()
    service = await restarts.start(worker, late)
    name = await create(service, lines_of(PARAMS | {"model": "late"}, PARAMS))
    await service.until(lambda: service.metric("tidegate_batch_lines", outcome="succeeded") == 1)
    assert (await ask(service, "GET", f"/v1/batches/{name}"))["status"] == "in_progress"
    await make_worker(model="late", port=port)
    assert (await over(service, name))["request_counts"]["completed"] == 2


async def test_lines_of_a_key_that_is_withdrawn_are_refused(
    restarts: Restarts, worker: FakeWorker
) -> None:
    worker.does(Plan(stall_at=1))
    service = await restarts.start(worker, keys=KEYS)
    name = await create(service, lines_of(PARAMS, PARAMS), "token-one")
    await service.until_tokens(1, tasks=2)
    await restarts.die()
    service = await restarts.start(worker, keys={"two": KEYS["two"]})
    await service.until(lambda: service.metric("tidegate_batch_lines", outcome="errored") == 2)
    await ask(service, "GET", f"/v1/batches/{name}", 401, "token-one")
    await ask(service, "GET", f"/v1/batches/{name}", 404, "token-two")
