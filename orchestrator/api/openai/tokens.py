"""``/v1/tokenize`` and ``/v1/detokenize``, as on vLLM's server."""

import asyncio
from typing import NamedTuple

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR, served_name
from orchestrator.api.http.decode import Reader
from orchestrator.api.http.fields import NULL, Unused, read_headers_deadline, refuse_unserved
from orchestrator.api.http.responses import json_response
from orchestrator.api.openai.chats import ChatMessage, chat_of
from orchestrator.api.openai.tools import stated_tools
from orchestrator.api.openai.types import ChatRequest
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Prompt


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body with exactly one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Whether a plain prompt gets the usual special tokens. A chat has those of its template."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = NULL
    chat_template: Unused = NULL
    documents: Unused = NULL
    tools: msgspec.Raw = NULL

    def prompt_of(self) -> Prompt:
        """The prompt to encode. Raises ``InvalidRequest``."""
        refuse_unserved(self, _ONLY)
        if (self.prompt is None) is (self.messages is None):
            raise InvalidRequest("expected exactly one of prompt and messages", field="prompt")
        if self.prompt is not None:
            return self.prompt
        if self.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is not supported with messages: the chat template has its own",
                field="add_special_tokens",
            )
        return chat_of(self, stated_tools(self.tools))


_ONLY = {name: ChatRequest.served[name] for name in ("chat_template", "documents")}
"""Unsupported fields that would change the prompt."""


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body with the token ids to decode."""

    model: str | None = None
    tokens: list[int]


class _Asked(NamedTuple):
    model: str
    prompt: Prompt
    is_bare: bool
    """Whether the prompt gets no special tokens. Plain prompts usually do."""
    with_spelling: bool


_tokenize_reader = Reader(TokenizeRequest)
_detokenize_reader = Reader(DetokenizeRequest)


async def tokenize(request: web.Request) -> web.Response:
    """Encode a prompt into token ids, exactly as for a request."""
    orchestrator, deadline = request.app[ORCHESTRATOR], read_headers_deadline(request)
    key = request[CONTEXT].key
    asked = await read_body(request, _tokenize_reader, lambda body: _asked(request, body))
    ids = await orchestrator.questions.tokenize(
        asked.model, asked.prompt, deadline, key.fingerprint, key.tenant
    )
    encoder = orchestrator.models.resolve(asked.model)
    if asked.is_bare:
        ids = encoder.without_added(ids)
    spellings = None
    if asked.with_spelling:  # up to the context's length, half a microsecond each
        spellings = await asyncio.to_thread(encoder.tokens.spellings_of, ids)
    return json_response(
        {
            "count": len(ids),
            "max_model_len": encoder.card.context_tokens,
            "tokens": ids,
            "token_strs": spellings,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """Decode token ids into text."""
    orchestrator, deadline = request.app[ORCHESTRATOR], read_headers_deadline(request)
    key = request[CONTEXT].key
    body = await read_body(request, _detokenize_reader, lambda body: body)
    text = await orchestrator.questions.detokenize(
        served_name(request, body.model), body.tokens, deadline, key.fingerprint, key.tenant
    )
    return json_response({"prompt": text})


def routes() -> list[web.RouteDef]:
    return [
        route
        for prefix in ("/v1", "")
        for route in (
            web.post(f"{prefix}/tokenize", tokenize),
            web.post(f"{prefix}/detokenize", detokenize),
        )
    ]


def _asked(request: web.Request, body: TokenizeRequest) -> _Asked:
    if body.messages is not None:
        request[CONTEXT].field_names = {"prompt": "messages"}
    return _Asked(
        served_name(request, body.model),
        body.prompt_of(),
        is_bare=body.prompt is not None and body.add_special_tokens is False,
        with_spelling=bool(body.return_token_strs),
    )
