"""Images in chats, from every dialect to the worker's job; and why they are refused."""

import base64
import hashlib
from typing import Any

import pytest

from protocol import ImageTokens, block_hashes, keyed_by_images
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import IMAGE_ID, FakeWorker, Plan, eyes
from tests.support.pictures import IMAGE_TEMPLATE, picture

CAT, DOG = picture(1), picture(2, 16, 16, "JPEG")
CAT_TOKENS, DOG_TOKENS = 15, 4
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TASKS = "/v2/tasks"
SHOWS_TOOLS = "{% if tools or messages[0].tool_calls %}{% endif %}"


@pytest.fixture
async def worker(make_worker: MakeWorker) -> FakeWorker:
    worker = await make_worker(**eyes())
    worker.plan = lambda submit: Plan(tokens=2)
    return worker


def url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def chat(*parts: Any, role: str = "user", **changes: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "fake", "messages": [{"role": role, "content": list(parts)}]}
    return CHAT, body | {"max_tokens": 4} | changes


def responses(*parts: Any, **changes: Any) -> tuple[str, dict[str, Any]]:
    said = [{"role": "user", "content": list(parts)}]
    return RESPONSES, {"model": "fake", "input": said, "max_output_tokens": 16} | changes


def messages(*blocks: Any, **changes: Any) -> tuple[str, dict[str, Any]]:
    said = [{"role": "user", "content": list(blocks)}]
    return MESSAGES, {"model": "fake", "messages": said, "max_tokens": 4} | changes


def tasks(images: list[str], role: str = "user", **changes: Any) -> tuple[str, dict[str, Any]]:
    said = [{"role": role, "content": "what?", "images": images}]
    return TASKS, {"model": "fake", "messages": said, "max_tokens": 4} | changes


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def image_url(value: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": value}


def input_image(value: object) -> dict[str, object]:
    return {"type": "input_image", "image_url": value, "detail": "high"}


def image(source: dict[str, object]) -> dict[str, object]:
    return {"type": "image", "source": source}


def base64_of(file: bytes) -> dict[str, object]:
    data = base64.b64encode(file).decode()
    return image({"type": "base64", "media_type": "image/png", "data": data})


async def post(service: Service, asked: tuple[str, dict[str, Any]], status: int = 200) -> Any:
    path, body = asked
    return await service.ask("POST", path, status, json=body)


async def refusal(service: Service, asked: tuple[str, dict[str, Any]]) -> str:
    """The message of the 400 with which a request is refused."""
    return str((await post(service, asked, 400))["error"]["message"])


EVERY_DIALECT = [
    chat(text("a "), image_url({"url": url(CAT), "detail": "low"}), image_url(url(DOG))),
    chat(text("a "), input_image(url(CAT)), input_image(url(DOG))),
    responses({"type": "input_text", "text": "a "}, input_image(url(CAT)), input_image(url(DOG))),
    messages(text("a "), base64_of(CAT), base64_of(DOG)),
    messages(text("a "), image({"type": "url", "url": url(CAT)}), base64_of(DOG)),
]


@for_each("asked", EVERY_DIALECT)
async def test_images_reach_the_worker_with_their_tokens(
    service: Service, worker: FakeWorker, asked: tuple[str, dict[str, Any]]
) -> None:
    answer = await post(service, asked)
    submit = worker.submits[-1]
    assert submit.images == [CAT, DOG]
    assert submit.token_ids.count(IMAGE_ID) == CAT_TOKENS + DOG_TOKENS
    tokens = service.orchestrator.models.resolve("fake").tokens
    shown = "".join(map(tokens.token_text, submit.token_ids))
    cat, dog = "<|image|>" * CAT_TOKENS, "<|image|>" * DOG_TOKENS
    assert shown == f"user:a <|see|>{cat}<|seen|><|see|>{dog}<|seen|>;assistant:"
    usage = answer["usage"]
    counted = usage.get("prompt_tokens", usage.get("input_tokens"))
    assert counted == len(submit.token_ids)


USED = {"type": "tool_use", "id": "c1", "name": "f"}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [text("r"), base64_of(CAT)]}
BLOCKS = [{"role": "assistant", "content": [USED]}, {"role": "user", "content": [RESULT]}]
TURNS = [
    {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": [text("r"), image_url(url(CAT))]},
]
OUTPUT = {"output": [text("r"), input_image(url(CAT))]}
ITEMS = [
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1"} | OUTPUT,
]
RESULTS = [(CHAT, "messages", TURNS), (RESPONSES, "input", ITEMS), (MESSAGES, "messages", BLOCKS)]


@for_each(("path", "field", "turns"), RESULTS)
async def test_a_user_shows_the_images_of_tools_results(
    make_worker: MakeWorker,
    make_service: MakeService,
    path: str,
    field: str,
    turns: list[dict[str, Any]],
) -> None:
    """An agent's screenshots, and the pictures that it reads: templates show none of tools."""
    worker = await make_worker(**eyes(chat_template=IMAGE_TEMPLATE + SHOWS_TOOLS))
    worker.plan = lambda submit: Plan(tokens=2)
    service = await make_service(worker)
    for more, words in (([], ""), ([{"role": "user", "content": "and"}], "and")):
        body = {"model": "fake", "max_tokens": 4, field: [*turns, *more]}
        await post(service, (path, body))
        assert worker.submits[-1].images == [CAT]
        tokens = service.orchestrator.models.resolve("fake").tokens
        shown = "".join(map(tokens.token_text, worker.submits[-1].token_ids))
        cat = f"<|see|>{'<|image|>' * CAT_TOKENS}<|seen|>"
        assert shown == f"assistant:;tool:r;user:{cat}{words};assistant:"


async def test_a_task_has_its_images_before_its_text(service: Service, worker: FakeWorker) -> None:
    await post(service, tasks([url(CAT)]), 202)
    await worker.until(lambda: bool(worker.submits))
    assert worker.submits[0].images == [CAT]
    shown = worker.submits[0].token_ids
    assert shown.index(IMAGE_ID) < shown.index(
        service.orchestrator.models.resolve("fake").encode("?")[0]
    )


async def test_text_that_looks_like_an_image_is_text(service: Service, worker: FakeWorker) -> None:
    await post(service, chat(text("<|image|>"), image_url(url(CAT))))
    assert worker.submits[0].token_ids.count(IMAGE_ID) == CAT_TOKENS


FOREIGN = "http://169.254.169.254/latest/meta-data"
REFUSED = [
    (chat(image_url({"url": FOREIGN})), "send the image itself as a data: URL"),
    (chat(image_url("file:///etc/passwd")), "not fetched from URLs (file: …)"),
    (chat(image_url({})), "messages[0].content[0].image_url.url is required"),
    (chat(image_url("data:image/png;base64,a*b")), "not valid base64"),
    (chat(image_url(url(picture(1, kind="BMP")))), "PNG, JPEG, GIF or WebP"),
    (chat(image_url(url(CAT)), role="system"), "images must be in a user message"),
    (chat({"type": "input_image", "file_id": "file-1"}), "uploaded files"),
    (responses(input_image(FOREIGN)), "send the image itself as a data: URL"),
    (responses({"type": "input_image", "file_id": "file-1"}), "uploaded files"),
    (messages(image({"type": "url", "url": FOREIGN})), "send the image itself as a data: URL"),
    (messages(image({"type": "base64", "data": "a*b"})), "not valid base64"),
    (tasks([FOREIGN]), "messages[0].images[0]: images are not fetched"),
    (tasks([url(CAT)], role="assistant"), "images must be in a user message"),
    (tasks([url(CAT)], durable=True), "durable"),
    (chat(*[image_url(url(CAT))] * 17), "17 images are more than the 16"),
    (chat(image_url(url(picture(1, 1700, 8)))), "more than 200 times"),
]


async def test_what_is_refused_is_told_why(service: Service, worker: FakeWorker) -> None:
    for asked, why in REFUSED:
        message = await refusal(service, asked)
        assert why in message, message
        assert "169.254" not in message
    assert not worker.submits


async def test_images_are_bounded_by_what_their_headers_say(
    make_service: MakeService, worker: FakeWorker
) -> None:
    """Pixels are counted before anything is decoded."""
    service = await make_service(worker, MAX_PIXELS=2000, MAX_COUNT=1)
    wide = await refusal(service, chat(image_url(url(picture(1, 100, 50, "JPEG")[:1000]))))
    assert "100x50 pixels, and at most 2000" in wide
    told = await service.ask("GET", "/v2/capabilities")
    assert "images" in told["features"]
    shown = {name: told["limits"][name] for name in ("images", "image_pixels")}
    assert shown == {"images": 1, "image_pixels": 2000}


async def test_images_count_towards_the_context(service: Service, worker: FakeWorker) -> None:
    """512 tokens: what an image takes is known before a worker has it."""
    message = await refusal(service, chat(*[image_url(url(picture(9, 60, 40)))] * 13))
    assert "maximum context length is 512 tokens" in message
    assert not worker.submits


async def test_a_model_without_eyes_refuses_by_name(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    service = await make_service(await make_worker())
    for asked in (*EVERY_DIALECT, tasks([url(CAT)])):
        message = await refusal(service, asked)
        assert "the model 'fake' reads text only, no images" in message
    assert "images" not in (await service.ask("GET", "/v2/capabilities"))["features"]
    (instance,) = (await service.ask("GET", "/v2/instances"))["instances"]
    assert "images" in instance["lacks"]


async def test_a_session_goes_on_with_its_images(service: Service, worker: FakeWorker) -> None:
    said = [{"role": "user", "content": "look", "images": [url(CAT)]}]
    made = await service.ask("POST", "/v2/sessions", 201, json={"messages": said})
    session = made["session_id"]
    more = {"session_id": session, "messages": [{"role": "user", "content": "again?"}]}
    for _ in range(2):
        await service.ask("POST", "/v2/tasks", 202, json=more | {"max_tokens": 4})
        await service.until(lambda: service.orchestrator.live_tasks == 0)
    assert [one.images for one in worker.submits] == [[CAT], [CAT]]
    shown = await service.ask("GET", f"/v2/sessions/{session}")
    assert shown["messages"][0] == {"role": "user", "content": "look", "images": 1}
    assert shown["bytes"] > len(CAT)


async def test_prefixes_are_found_by_what_images_show(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    """A worker that has the cat's blocks is said to have nothing of the dog's, of equal size."""
    worker = await make_worker(**eyes())
    service = await make_service(worker)
    cat, other = picture(1), picture(7)
    asked = {seen: chat(image_url(url(seen)), text("x" * 40)) for seen in (cat, other)}
    await post(service, asked[cat])
    ids = worker.submits[0].token_ids
    sizes = [ImageTokens(hashlib.sha256(cat).digest(), CAT_TOKENS)]
    worker.cached = block_hashes(keyed_by_images(ids, IMAGE_ID, sizes), 16, b"")
    service = await make_service(worker)
    await service.until(lambda: bool(service.orchestrator.registry.prefixes))
    likely = {}
    for seen in (cat, other):
        service.orchestrator.on_offered.append(
            lambda task, seen=seen: likely.__setitem__(seen, task.likely_cached)
        )
        await post(service, asked[seen])
        service.orchestrator.on_offered.clear()
    assert likely[cat] > 32 > likely[other]


async def test_images_of_all_requests_are_bounded_and_let_go(
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.admission.images.ALL_BYTES", len(CAT) + 100)
    stall = worker.does(Plan(tokens=4, stall_at=1))
    await post(service, tasks([url(CAT)]), 202)
    gate = service.orchestrator.stages.reader.images
    assert gate.held_bytes == len(CAT)
    answer = await post(service, chat(image_url(url(CAT))), 429)
    assert "bytes of images" in answer["error"]["message"]
    stall.release.set()
    await service.until(lambda: service.orchestrator.live_tasks == 0)
    assert gate.held_bytes == 0
    path, body = tasks([url(CAT)])
    await post(service, (path.replace("tasks", "quote"), body))
    assert gate.held_bytes == 0  # a quote keeps nothing
    await post(service, chat(image_url(url(CAT))))


async def test_or24_a_tenant_leaves_room_for_the_images_of_others(
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.admission.images.ALL_BYTES", 4 * len(CAT))
    stall = worker.does(Plan(tokens=4, stall_at=1))
    for status in (202, 202, 202, 429, 429):
        await post(service, tasks([url(CAT)], tenant="loud"), status)
    await post(service, tasks([url(CAT)], tenant="calm"), 202)
    stall.release.set()
