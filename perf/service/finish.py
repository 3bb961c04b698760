"""Answers at their deadline: whole with ``finish``, beside ``partial``, and what that costs.

Stories of some 170 tokens, and values of a schema, each asked for with deadlines from long before
they could be done to long after, by a few clients at once on the demo engine. The same requests
with the same seeds in both manners, in turns. A story is whole if its last sentence ends, a value
if it parses and has what its schema requires. The cost is how much less likely the last tokens are
to the model than those of an answer that is just cut, as the mean of their log-probabilities.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import aiohttp

from perf.load.chats import story
from perf.load.connection import HOST
from perf.report.bundle import Figure
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec

CLIENTS: Final = 4
STORIES, VALUES, FEW = 120, 60, 12
MANNERS: Final = ("finish", "partial")
DEADLINES_MS: Final = {"story": (500, 4000), "value": (2000, 8000)}
"""Least and greatest deadline; as many are drawn of each octave. The shortest value of the schema
takes 70 tokens, for which there must be time."""
_LAST: Final = 8
_ENDS: Final = (".", "!", "?", '."', '!"', '?"')
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 8},
        "scenes": {
            "type": "array",
            "minItems": 2,
            "items": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "text": {"type": "string"}},
                "required": ["place", "text"],
                "additionalProperties": False,
            },
        },
        "sad": {"type": "boolean"},
    },
    "required": ["title", "scenes", "sad"],
    "additionalProperties": False,
}
_FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "story", "schema": _SCHEMA}}


class Answered(NamedTuple):
    """One answer that its deadline cut, or that was made to end before it."""

    is_whole: bool
    is_met: bool
    last_logprob: float
    """Mean log-probability of the last tokens."""


async def run(context: Context) -> list[Figure]:
    stack = await context.stack(StackSpec("torch", device=context.device))
    figures: list[Figure] = []
    async with aiohttp.ClientSession(f"http://{HOST}:{stack.port}") as session:
        for kind, count in (("story", STORIES), ("value", VALUES)):
            asks = _asks(kind, FEW if context.quick else count)
            found = {manner: await _answers(session, asks, manner) for manner in MANNERS}
            figures += [_figure(kind, manner, found[manner]) for manner in MANNERS]
            lost = [
                _mean([one.last_logprob for one in found["partial"]])
                - _mean([one.last_logprob for one in found["finish"]])
            ]
            label = f"{kind}: log-probability lost per token, last {_LAST}"
            figures.append(Figure.of(f"finish.{kind}.cost", label, "nats", lost))
    return figures


def _asks(kind: str, count: int) -> list[dict[str, Any]]:
    rng = random.Random(5)
    low, high = DEADLINES_MS[kind]
    asks = []
    for _ in range(count):
        body: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": story(rng)}],
            "max_tokens": 512,
            "temperature": 1.0,
            "seed": rng.randrange(2**31),
            "logprobs": True,
            "deadline_ms": round(low * (high / low) ** rng.random()),
        }
        asks.append(body | ({"response_format": _FORMAT} if kind == "value" else {}))
    return asks


async def _answers(
    session: aiohttp.ClientSession, asks: list[dict[str, Any]], manner: str
) -> list[Answered]:
    """Answers that did not end by themselves."""
    left, found = list(asks), list[Answered]()

    async def client() -> None:
        while left:
            body = left.pop()
            url = "/v1/chat/completions"
            async with session.post(url, json=body | {"on_deadline": manner}) as response:
                answer = await response.json()
            if response.status != 200:
                found.append(Answered(False, False, 0.0))  # too late for any token
            elif answer["choices"][0]["finish_reason"] != "stop":
                found.append(_read(answer["choices"][0], is_value="response_format" in body))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return found


def _read(choice: Mapping[str, Any], *, is_value: bool) -> Answered:
    text = (choice["message"]["content"] or "").rstrip()
    last = [token["logprob"] for token in choice["logprobs"]["content"][-_LAST:]]
    is_whole = _is_value(text) if is_value else text.endswith(_ENDS)
    return Answered(is_whole, choice["finish_reason"] == "length", _mean(last))


def _is_value(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    scenes = value.get("scenes", ())
    return (
        set(value) == {"title", "scenes", "sad"}
        and len(value["title"]) >= 8
        and len(scenes) >= 2
        and all(set(scene) == {"place", "text"} for scene in scenes)
    )


def _figure(kind: str, manner: str, found: list[Answered]) -> Figure:
    label = f"{kind}, {manner}: whole of {len(found)} that did not end by themselves"
    share = _mean([float(one.is_whole) for one in found])
    return Figure.of(f"finish.{kind}.{manner}.whole", label, "", [share], better="higher")


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


BENCH = Bench(
    "finish", "answers that end whole at their deadline", run, limit_s=400.0, in_quick=False
)
