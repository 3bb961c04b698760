"""Soak clients that send every kind of request that the service supports, in turn."""

import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from perf.chaos.clients import ChaosLedger

_FORM: Final = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}},
    "required": ["name"],
    "additionalProperties": False,
}
_TOOL: Final = {
    "name": "look",
    "description": "Look at a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
_USER: Final = {"role": "user", "content": "{words}"}
_CHAT: Final = {"model": "demo", "max_tokens": 12, "messages": [_USER]}
_TEXT: Final = {"model": "demo", "max_tokens": 12, "prompt": "{words}"}
_INPUT: Final = {"model": "demo", "max_output_tokens": 16, "input": "{words}"}
_PAGES: Final = tuple(
    """
    / /page/icon.svg /health /health/live /health/ready /health/startup
    /metrics /metrics/vllm
    /v1/batches /v1/batches/{batch} /v1/files /v1/files/{file} /v1/files/{file}/content
    /v1/models /v1/models/demo
    /v1/responses/{response}
    /v2/capabilities /v2/instances /v2/overview /v2/sessions /v2/sessions/{session}
    /v2/tasks /v2/tasks/{task} /v2/tasks/{task}/events /v2/budget
    """.split()  # noqa: SIM905 - as a list it would be forty lines
)
_POSTS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("/v1/completions", _TEXT),
    ("/v1/completions", _TEXT | {"logprobs": 5, "echo": True}),
    ("/v1/completions", _TEXT | {"n": 3, "stream": True}),
    *(
        ("/v1/completions", _TEXT | {"on_deadline": way, "deadline_ms": 20_000})
        for way in ("partial", "fit", "finish")
    ),
    ("/v1/chat/completions", _CHAT | {"logprobs": True, "top_logprobs": 20}),
    ("/v1/chat/completions", _CHAT | {"stream": True, "user": "{word}"}),
    ("/v1/chat/completions", _CHAT | {"tell_time": True, "max_run_tokens": 100_000}),
    ("/v1/chat/completions", _CHAT | {"tools": [{"type": "function", "function": _TOOL}]}),
    (
        "/v1/chat/completions",
        _CHAT
        | {
            "max_tokens": 48,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "who", "schema": _FORM},
            },
        },
    ),
    ("/v1/responses", _INPUT),
    ("/v1/responses", _INPUT | {"stream": True}),
    ("/v1/responses", _INPUT | {"previous_response_id": "{response}"}),
    ("/v1/messages", _CHAT),
    ("/v1/messages", _CHAT | {"stream": True, "system": "{words}"}),
    ("/v1/messages/count_tokens", {"model": "demo", "messages": [_USER]}),
    ("/v2/quote", _TEXT),
    ("/v2/quote", _TEXT | {"accept": 0.9, "hold_ms": 50}),
    ("/v2/tasks", _TEXT | {"tenant": "{word}"}),
    ("/v2/tasks", _TEXT | {"durable": True}),
    ("/v2/tasks", _TEXT | {"session_id": "{session}"}),
    ("/v2/sessions", {"model": "demo"}),
    ("/v1/files", {}),
    (
        "/v1/batches",
        {
            "input_file_id": "{file}",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        },
    ),
)
_OPENINGS: Final = ("Once upon a time", "The old sailor said", "In the garden a fox")
KINDS: Final = (*(("GET", page, None) for page in _PAGES), *(("POST", *post) for post in _POSTS))
_LINES: Final = "\n".join(
    json.dumps({"custom_id": str(line), "method": "POST", "url": "/v1/completions", "body": _TEXT})
    for line in range(3)
)


@dataclass(slots=True)
class EveryKind:
    """Sends one request of each kind after the other; any answer but a success is a fault."""

    http: aiohttp.ClientSession
    url: str
    ledger: ChaosLedger
    rng: random.Random
    _number: "itertools.count[int]" = field(default_factory=itertools.count)
    _known: dict[str, str] = field(default_factory=dict)
    """The latest id of each object that later requests use."""

    async def visit(self) -> None:
        """Send the request of the next kind, if its object exists."""
        method, path, body = KINDS[next(self._number) % len(KINDS)]
        try:
            path, text = self._filled(path), self._filled(json.dumps(body))
        except KeyError:  # in the first round, its object does not exist yet
            return
        # Each is a run of its own, too.
        trace = f"00-{self.rng.randrange(1, 2**128):032x}-{1:016x}-00"
        headers = {"Content-Type": "application/json", "traceparent": trace}
        if path.startswith(("/v2/tasks", "/v1/files")):
            headers["Idempotency-Key"] = f"every-{self.rng.random()}"
        sent: Any = None if body is None else text
        if path == "/v1/files":
            del headers["Content-Type"]
            sent = aiohttp.FormData({"purpose": "batch"})
            sent.add_field("file", self._filled(_LINES).encode(), filename="lines.jsonl")
        outcome = "met"
        try:
            async with self.http.request(
                method, self.url + path, data=sent, headers=headers
            ) as answer:
                said = await answer.read()
                if answer.status >= 300:
                    outcome = f"{answer.status} {said[:200]!r}"
                elif b"event: error" in said:
                    outcome = f"{said[-200:]!r}"
                elif method == "POST" and said.startswith(b"{"):
                    self._remember(json.loads(said))
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome = type(error).__name__
        if outcome != "met":
            self.ledger.fault(f"{method} {path} came to {outcome}")
        self.ledger.ended("every kind", "met" if outcome == "met" else "failed")

    def _remember(self, said: Mapping[str, Any]) -> None:
        for name in ("task", "session"):
            if said.get(f"{name}_id"):
                self._known[name] = said[f"{name}_id"]
        if said.get("object") in ("response", "file", "batch"):
            self._known[said["object"]] = said["id"]

    def _filled(self, text: str) -> str:
        # How long answers get is learnt for each way in which prompts begin, up to thousands.
        words = self.rng.choice(_OPENINGS) + f" {self.rng.random():.6f}" * self.rng.choice((1, 6))
        text = text.replace("{words}", words).replace("{word}", words[:2])
        for name in ("response", "task", "session", "file", "batch"):
            if f"{{{name}}}" in text:
                text = text.replace(f"{{{name}}}", self._known[name])
        return text
