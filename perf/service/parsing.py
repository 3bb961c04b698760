"""Cost for a token of a stream that may think or call tools (OR-3).

The chunks of one chat, written to nowhere, on this thread: as for requests without tools, which
have no parser, and with one, while the model says plain text, thinks, and writes a call.
"""

import asyncio
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from orchestrator.api.http.event_stream import EventStream
from orchestrator.api.http.outputs import TaskOutput
from orchestrator.api.openai.choices import Choices
from orchestrator.api.openai.chunks import ChunkStream, ParsedChunkStream
from orchestrator.api.openai.shapes import CHAT
from orchestrator.api.openai.types import AnswerOptions
from orchestrator.parsing import CallFormat, OutputFormat, ToolUse
from orchestrator.parsing.formats import TAGS
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Api, Job
from orchestrator.tasks.task import Task
from orchestrator.tasks.tools import Tool
from perf.load.drive import ratios
from perf.report.bundle import Figure
from perf.stack.context import Bench, Context
from protocol import Delta, Sampling

TOKENS = 2000
"""Tokens of each text, per sample."""
_FORMAT = OutputFormat(CallFormat.HERMES, TAGS["think"])
_TOOLS = ToolUse((Tool("write_file"),))
_WORDS = [" the", " cat", " sat", " on", " a", " mat", ".", "\n"]
_TEXTS = {
    "content": ("", _WORDS),
    "reasoning": ("<think>", _WORDS),
    "call": (
        '<tool_call>\n{"name": "write_file", "arguments": {"text": "',
        [*_WORDS[:-1], "\\n"],
    ),
}


async def run(context: Context) -> list[Figure]:
    return await asyncio.to_thread(_measure, 15 if context.quick else 60)


def _measure(samples: int) -> list[Figure]:
    took: dict[str, list[float]] = {name: [] for name in ("plain", *_TEXTS)}
    for _ in range(samples):
        for name, of_name in took.items():
            begin, words = _TEXTS.get(name, _TEXTS["content"])
            of_name.append(_us_per_token(_stream(name != "plain"), begin, words))
    of = Figure.of
    return [
        of("parsing.plain_us", "a token's chunk without a parser", "µs/token", took["plain"]),
        of("parsing.content_us", "with tools: text", "µs/token", took["content"]),
        of("parsing.reasoning_us", "with tools: reasoning", "µs/token", took["reasoning"]),
        of("parsing.call_us", "with tools: arguments of a call", "µs/token", took["call"]),
        of(
            "parsing.ratio",
            "text with tools ÷ without",
            "",
            ratios(took["content"], took["plain"]),
            tolerance=1.5,
        ),
    ]


def _us_per_token(stream: ChunkStream, begin: str, words: list[str]) -> float:
    """CPU time per token of this thread, in µs."""
    task = _task()
    deltas = [Delta(1, [7], [words[at % len(words)]]) for at in range(TOKENS)]
    stream.started(task)
    stream.tokens(task, Delta(1, [7], [begin or "So"]))
    begun = time.thread_time()
    for delta in deltas:
        stream.tokens(task, delta)
    return (time.thread_time() - begun) * 1e6 / TOKENS


def _stream(is_parsed: bool) -> ChunkStream:
    job = _task().job
    request = SimpleNamespace(job=job, options=AnswerOptions())
    choices = cast(Choices, SimpleNamespace(request=request, first=_task(), told_tier=lambda: {}))
    nowhere = cast(EventStream, SimpleNamespace(send=_nothing))
    new: Callable[..., ChunkStream] = ChunkStream
    arguments: list[Any] = [nowhere, CHAT, choices, 0]
    if is_parsed:
        tokens = SimpleNamespace(
            special_ids=lambda spellings: {}, token_text=str, end_of=lambda ids: ""
        )
        encoder = SimpleNamespace(tokens=tokens)
        new = ParsedChunkStream
        arguments.insert(0, TaskOutput(_FORMAT, cast(PromptEncoder, encoder), _TOOLS))
    return new(*arguments, created=0, encoder_of=_nothing)


def _task() -> Task:
    job = Job(
        api=Api.CHAT,
        model="model",
        sampling=Sampling(max_tokens=TOKENS),
        max_tokens=TOKENS,
        deadline=Deadline(math.inf, 0),
        correlation_id="",
        arrived=0.0,
    )
    return Task("0" * 32, job)


def _nothing(data: bytes = b"") -> None:
    pass


BENCH = Bench("parsing", "reasoning and tool calls split off, per token", run, limit_s=30)
