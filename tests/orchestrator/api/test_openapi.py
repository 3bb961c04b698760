"""``/openapi.json``: every route, with what it takes."""

from typing import Any

from orchestrator.api.openapi import document as openapi
from tests.orchestrator.conftest import Service


async def test_every_description_is_served(service: Service) -> None:
    told = await service.ask("GET", "/openapi.json")
    assert told["openapi"] == "3.1.0"
    served = {f"{m.upper()} {path}" for path, methods in told["paths"].items() for m in methods}
    app = service.runner.app
    assert app is not None
    assert served >= set(openapi.operations_of(app))


async def test_bodies_are_those_of_the_decoders(service: Service) -> None:
    told = await service.ask("GET", "/openapi.json")
    schemas = told["components"]["schemas"]

    def body_of(path: str) -> Any:
        content = told["paths"][path]["post"]["requestBody"]["content"]
        ref = content["application/json"]["schema"]["$ref"]
        return schemas[ref.rpartition("/")[2]]

    chat = body_of("/v1/chat/completions")
    assert set(chat["required"]) == {"messages"}
    assert "additionalProperties" not in chat
    assert body_of("/v2/tasks")["additionalProperties"] is False
    assert {"deadline_ms", "top_logprobs", "tools", "prompt_logprobs"} <= set(chat["properties"])
    assert {"prompt", "echo"} <= set(body_of("/v1/completions")["properties"])
    (header,) = told["paths"]["/v1/completions"]["post"]["parameters"]
    assert (header["name"], header["in"]) == ("X-Timeout-Ms", "header")
    responses = told["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "429", "499", "502", "503", "504"} <= set(responses)
