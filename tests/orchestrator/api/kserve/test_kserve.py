"""``/v2/models``: what clients of a plain Triton send, with deadlines and placement (OR-2)."""

import json
import re
from pathlib import Path
from typing import Any

from orchestrator.api.kserve.metadata import INPUTS, OUTPUTS
from tests.orchestrator.conftest import MakeService, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan

HI: dict[str, Any] = {"text_input": "hi", "parameters": {"max_tokens": 4, "temperature": 0}}
GENERATE = "/v2/models/fake/generate"


async def post(
    service: Service, body: object, path: str = GENERATE, status: int = 200, **headers: str
) -> dict[str, Any]:
    answer: dict[str, Any] = await service.ask("POST", path, status, json=body, headers=headers)
    return answer


async def pieces_of(service: Service, body: object) -> list[dict[str, Any]]:
    async with service.http.post(f"{GENERATE}_stream", json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        events = (await response.text()).split("\n\n")
    assert events.pop() == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_generate(service: Service, worker: FakeWorker) -> None:
    answer = await post(service, HI)
    assert answer == {"model_name": "fake", "model_version": "1", "text_output": "hiw0 w1 w2 w3 "}
    assert worker.submits[0].sampling.temperature == 0
    body = HI | {
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "id": "mine",
    }
    for path in ("/v2/models/llm/generate", "/v2/models/fake/versions/1/generate"):
        answer = await post(service, body, path)
        assert answer.pop("text_output") == "w0 w1 w2 w3 "
        assert (answer.pop("finish_reason"), answer.pop("id")) == ("length", "mine")
        assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (2, 4)


async def test_sampling_parameters_are_vllms(service: Service, worker: FakeWorker) -> None:
    """Numbers may be strings; where there are any, the others say nothing of the sampling."""
    stated = {
        "max_tokens": "3",
        "temperature": "0.5",
        "stop": "x",
        "n": 1,
        "use_beam_search": False,
        "stop_token_ids": [3],
        "skip_special_tokens": False,
    }
    body = {
        "text_input": "hi",
        "sampling_parameters": json.dumps(stated),
        "parameters": {"max_tokens": 9, "deadline_ms": 5000, "priority": 3},
    }
    await post(service, body)
    submit = worker.submits[0]
    assert (submit.sampling.max_tokens, submit.sampling.temperature) == (3, 0.5)
    assert submit.sampling.stop == ("x",)
    assert submit.sampling.stop_token_ids == (3,)
    assert submit.sampling.skip_special_tokens is False
    assert submit.budget_ms <= 5000
    await post(service, {"text_input": "hi"})
    assert worker.submits[1].sampling.max_tokens == 16


async def test_logprobs_are_as_tritons(service: Service) -> None:
    asked = {"return_logprobs": True, "return_cumulative_logprob": True}
    answer = await post(service, HI | asked)
    assert answer["cumulative_logprob"] == -2.0
    assert answer["logprobs"] == "null"
    parameters = HI["parameters"] | {"logprobs": 1}
    answer = await post(service, HI | asked | {"parameters": parameters})
    described = json.loads(answer["logprobs"])
    assert len(described) == 4
    assert set(described[0]["0"]) == {"logprob", "rank", "decoded_token"}


async def test_generate_stream(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(tail="…")
    body = HI | {"stream": True, "return_finish_reason": True, "return_num_output_tokens": True}
    pieces = await pieces_of(service, body)
    assert "".join(piece["text_output"] for piece in pieces) == "w0 w1 w2 w3 …"
    assert [piece["finish_reason"] for piece in pieces] == [*["None"] * 4, "length"]
    assert sum(piece["num_output_tokens"] for piece in pieces) == 4
    assert "left=" in pieces[-1]["deadline_budget"]
    (piece,) = await pieces_of(service, HI)
    assert piece["text_output"] == "hiw0 w1 w2 w3 …"


@for_each(
    ("body", "word"),
    [
        ({}, "text_input"),
        ({"text_input": "x", "parameters": {"n": 2}}, "n=2"),
        ({"text_input": "x", "parameters": {"max_tokens": "many"}}, "max_tokens"),
        ({"text_input": "x", "parameters": []}, "parameters"),
        ({"text_input": "x", "parameters": {"priority": "urgent"}}, "priority"),
        ({"text_input": "x", "sampling_parameters": "nonsense"}, "sampling_parameters"),
        ({"text_input": "x", "sampling_parameters": '{"seed": 1e400}'}, "out of range"),
        ({"text_input": "x", "parameters": {"stop": ["x" * 9999]}}, "stop"),
        ({"text_input": "x", "parameters": {"deadline_ms": "nan"}}, "deadline"),
        ({"text_input": "x", "parameters": {"temperature": "nan"}}, "temperature"),
        ({"text_input": "x", "stream": True}, "generate_stream"),
        ({"text_input": "x" * 600}, "context"),
    ],
)
async def test_bad_input_is_told_in_tritons_shape(
    service: Service, worker: FakeWorker, body: object, word: str
) -> None:
    answer = await post(service, body, status=400)
    assert set(answer) == {"error"} and word in answer["error"]
    assert not worker.submits


async def test_deadlines_count_wherever_they_stand(service: Service, worker: FakeWorker) -> None:
    """DL-1, DL-5."""
    worker.plan = lambda submit: Plan(stall_at=0)
    for body, headers in (
        (HI, {"X-Timeout-Ms": "20000"}),
        ({"text_input": "x", "parameters": {"deadline_ms": "20000"}}, {}),
        ({"text_input": "x", "sampling_parameters": '{"deadline_ms": 20000}'}, {}),
    ):
        async with service.leaping(21, tokens=0):
            answer = await post(service, body, status=504, **headers)
        assert answer["error"].startswith("deadline_")
    past = {"sampling_parameters": "{}", "parameters": {"deadline_unix_ms": 1000}}
    answer = await post(service, {"text_input": "x"} | past, status=504)
    assert answer["error"].startswith("deadline_")


async def test_an_error_mid_stream_is_an_event(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(fail_at=2)
    pieces = await pieces_of(service, HI | {"stream": True})
    assert len(pieces) == 3
    assert pieces[-1]["error"].startswith("engine_error: ")


async def test_placement_counts(service: Service, worker: FakeWorker) -> None:
    avoid = {"mode": "avoid", "instances": [worker.address]}
    answer = await post(service, HI | {"parameters": {"placement": avoid}}, status=503)
    assert set(answer) == {"error"} and "placement" in answer["error"]
    assert not worker.submits


async def test_what_there_is(worker: FakeWorker, make_service: MakeService) -> None:
    """Probes carry no token; models are for those who have one."""
    service = await make_service(worker, token="right")
    for path in ("/v2/health/live", "/v2/health/ready"):
        await service.ask("GET", path)
    assert set(await service.ask("GET", "/v2/models/fake", 401)) == {"error"}
    service.http.headers["Authorization"] = "Bearer right"
    assert (await service.ask("GET", "/v2"))["name"] == "tidegate"
    described = await service.ask("GET", "/v2/models/llm")
    assert (described["name"], described["versions"]) == ("fake", ["1"])
    for path, status in (("fake/ready", 200), ("fake/versions/2/ready", 404), ("none/ready", 404)):
        await service.ask("GET", f"/v2/models/{path}", status)
    await worker.stop()
    await service.until(lambda: not any(i.ready for i in service.orchestrator.registry))
    for path in ("/v2/health/ready", "/v2/models/fake/ready"):
        await service.ask("GET", path, 503)


def test_tensors_are_those_of_the_model() -> None:
    """But for the lanes' own."""
    config = (Path(__file__).parents[4] / "model_repository/llm/config.pbtxt").read_text()
    found = re.findall(r'name: "(\w+)"\s+data_type: TYPE_(\w+)', config)
    kinds = {name: "BYTES" if kind == "STRING" else kind for name, kind in found}
    del kinds["lane_message"], kinds["frame"]
    assert kinds == INPUTS | OUTPUTS
