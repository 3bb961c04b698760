"""A dialect: ``POST /ask`` with ``{"question": "…"}`` answers ``{"answer": "…"}``."""

from typing import Final

from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import Dialect
from orchestrator.api.http.fields import GenerationRequest, read_job
from orchestrator.api.http.responses import json_response, whole_answer
from orchestrator.tasks.job import Api, Job, Prompt

ASK: Final = Dialect("/ask", lambda error, request_id: {"sorry": error.message}, is_tolerant=True)


class Question(GenerationRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body: the base has model, sampling and deadline."""

    question: str

    def prompt_of(self) -> Prompt:
        return self.question


async def ask(request: web.Request) -> web.Response:
    """Generate a whole answer."""

    def parse(body: Question) -> tuple[Job, Prompt]:
        return read_job(request, body, Api.COMPLETIONS, keep=False)

    job, prompt = await read_body(request, Question, parse)
    task, answer = await whole_answer(request, job, prompt)
    assert task.ending is not None
    return json_response({"answer": answer.text() + task.ending.tail})


def routes() -> list[web.RouteDef]:
    return [web.post("/ask", ask)]
