"""``/v1/score`` and ``/v1/rerank``: how alike texts are, by the cosine of their embeddings.

Shapes are those of vLLM's server, whose reranking is Jina's and Cohere's. Each text is a task that
makes an embedding; a score is from -1 to 1 and no probability.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from orchestrator.api.http.answer_ids import answer_id
from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.decode import Reader
from orchestrator.api.http.fields import NULL, ServedValues, Unused
from orchestrator.api.openai.choices import Choices
from orchestrator.api.openai.embeddings import (
    EmbeddingFields,
    answered,
    embedded,
    embedding_request,
    tokens_read,
)
from orchestrator.api.openai.types import ParsedCompletion, split_list
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import Api
from orchestrator.tasks.task import Task

_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""Names of the two sides of a score request; vLLM has all of them."""


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text in an object."""

    text: str


_text_reader: Reader[str | _Document] = Reader(str | _Document)


class Texts(NamedTuple):
    """Texts as one field of a body states them, and the name of each for errors."""

    texts: tuple[str, ...]
    fields: tuple[str, ...]


class ScoreRequest(EmbeddingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of a score request: two sides, each a text or a list of at most 128. One text is
    compared with each of the other side; two lists of one length in pairs."""

    text_1: Unused = NULL
    text_2: Unused = NULL
    queries: Unused = NULL
    documents: Unused = NULL
    items: Unused = NULL
    data_1: Unused = NULL
    data_2: Unused = NULL

    def sides(self) -> tuple[Texts, Texts]:
        """Both sides' texts. Raises ``InvalidRequest``."""
        stated = {name for pair in _PAIRS for name in pair if getattr(self, name) != NULL}
        pair = next((pair for pair in _PAIRS if stated == set(pair)), None)
        if pair is None:
            raise InvalidRequest(
                "expected two sides: text_1 and text_2, queries and documents, queries and items, "
                "or data_1 and data_2",
                field=next((first for first, second in _PAIRS if second in stated), "text_1"),
            )
        one, other = (_read_texts(getattr(self, name), name) for name in pair)
        if len(one.texts) not in (1, len(other.texts)):
            raise InvalidRequest(
                f"{pair[0]} has {len(one.texts)} texts and {pair[1]} {len(other.texts)}: expected "
                f"as many, or one in {pair[0]}",
                field=pair[0],
            )
        return one, other


class RerankRequest(EmbeddingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of a rerank request: a query and at most 128 documents, strings or objects with a
    ``text``."""

    served: ClassVar[Mapping[str, ServedValues]] = {
        **EmbeddingFields.served,
        "max_chunks_per_doc": ServedValues(
            lambda value: False, "documents are read whole", is_hint=True
        ),
        "max_tokens_per_doc": ServedValues(
            lambda value: False, "documents are read whole", is_hint=True
        ),
        "rank_fields": ServedValues(
            lambda value: value in ([], ["text"]), "documents are ranked by their text"
        ),
    }

    query: Unused
    documents: Unused
    top_n: int | None = None
    """How many results to return, the best; 0 or None for all."""
    return_documents: bool | None = None
    """Whether results have the documents' texts; they have unless it is false."""

    # Cohere's
    max_chunks_per_doc: Unused = NULL
    max_tokens_per_doc: Unused = NULL
    rank_fields: Unused = NULL

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequest(
                f"top_n must be 0, for all documents, or more, got {self.top_n}", field="top_n"
            )


class _Ranking(NamedTuple):
    """A parsed rerank request, without its body."""

    parsed: ParsedCompletion
    fields: tuple[str, ...]
    top_n: int
    documents: tuple[str, ...] | None
    """The documents' texts, where the answer has them."""


class _Scoring(NamedTuple):
    """A parsed score request, without its body."""

    parsed: ParsedCompletion
    fields: tuple[str, ...]
    left: int
    """How many texts the first side has."""


_score_reader = Reader(ScoreRequest)
_rerank_reader = Reader(RerankRequest)


async def score(request: web.Request) -> web.Response:
    """Compare texts in pairs, or one text with each of several."""
    asked = await read_body(request, _score_reader, lambda body: _scoring(request, body))
    tasks = await _embedded(request, asked.parsed, asked.fields)
    cosines = _cosines(tasks[: asked.left], tasks[asked.left :])
    body = {
        "id": answer_id(tasks[0]),
        "object": "list",
        "created": int(request[CONTEXT].arrival.unix),
        "model": tasks[0].model,
        "data": [
            {"index": index, "object": "score", "score": cosine}
            for index, cosine in enumerate(cosines)
        ],
        "usage": tokens_read(tasks),
    }
    return answered(request, body, tasks)


async def rerank(request: web.Request) -> web.Response:
    """Order documents by how alike they and a query are."""
    asked = await read_body(request, _rerank_reader, lambda body: _ranking(request, body))
    tasks = await _embedded(request, asked.parsed, asked.fields)
    cosines = _cosines(tasks[:1], tasks[1:])
    best = sorted(range(len(cosines)), key=lambda index: -cosines[index])
    results: list[dict[str, object]] = []
    for index in best[: asked.top_n or None]:
        result: dict[str, object] = {"index": index, "relevance_score": cosines[index]}
        if asked.documents is not None:
            result["document"] = {"text": asked.documents[index]}
        results.append(result)
    body = {
        "id": answer_id(tasks[0]),
        "model": tasks[0].model,
        "usage": tokens_read(tasks),
        "results": results,
    }
    return answered(request, body, tasks)


def routes() -> list[web.RouteDef]:
    return [
        *(web.post(f"{at}/score", score) for at in ("", "/v1")),
        *(web.post(f"{at}/rerank", rerank) for at in ("", "/v1", "/v2")),
    ]


def _scoring(request: web.Request, body: ScoreRequest) -> _Scoring:
    body.refuse_unsupported()
    one, other = body.sides()
    parsed = embedding_request(request, body, Api.SCORE, one.texts + other.texts)
    request[CONTEXT].field_names = {"prompt": other.fields[0].partition("[")[0]}
    return _Scoring(parsed, one.fields + other.fields, len(one.texts))


def _ranking(request: web.Request, body: RerankRequest) -> _Ranking:
    body.refuse_unsupported()
    query, documents = _read_text(body.query, "query", "query"), _read_texts(body.documents)
    parsed = embedding_request(request, body, Api.RERANK, (query, *documents.texts))
    request[CONTEXT].field_names = {"prompt": "documents"}
    return _Ranking(
        parsed,
        ("query", *documents.fields),
        body.top_n or 0,
        None if body.return_documents is False else documents.texts,
    )


async def _embedded(
    request: web.Request, parsed: ParsedCompletion, fields: tuple[str, ...]
) -> list[Task]:
    """The tasks of all texts, ended well; ``fields`` has the name of each, for an error."""
    choices = Choices(request.app[ORCHESTRATOR], parsed)
    try:
        return await embedded(request, choices)
    except InvalidRequest:
        if choices.prompts_read < len(fields):
            request[CONTEXT].field_names = {"prompt": fields[choices.prompts_read]}
        raise


def _read_texts(stated: msgspec.Raw, field: str = "documents") -> Texts:
    text = bytes(memoryview(stated)).strip()
    if not text.startswith(b"["):
        return Texts((_read_text(stated, field, field),), (field,))
    items = split_list(text, field)
    if not items:
        raise InvalidRequest(f"{field} is empty; it needs at least one text", field=field)
    fields = tuple(f"{field}[{at}]" for at in range(len(items)))
    return Texts(
        tuple(_read_text(item, at, f"{field}[]") for item, at in zip(items, fields, strict=True)),
        fields,
    )


def _read_text(stated: msgspec.Raw, field: str, place: str) -> str:
    """A text at ``field``; ``place`` is that without an index, for what is passed over."""
    try:
        read = _text_reader.read(stated, place)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(
            f"{field} must be a string, or an object with a string text: only texts are compared",
            field=field,
        ) from None
    return read if isinstance(read, str) else read.text


def _cosines(ones: list[Task], others: list[Task]) -> list[float]:
    """The cosine of each of ``others`` with the one at its place, or with the only one."""
    one, other = _directions(ones), _directions(others)
    return [float(cosine) for cosine in np.clip((one * other).sum(axis=1), -1.0, 1.0)]


def _directions(tasks: list[Task]) -> npt.NDArray[np.float64]:
    """The embeddings ``[tasks, size]``, scaled to length 1; one without a direction stays 0."""
    vectors = np.stack(
        [np.frombuffer(task.ending.embedding, "<f4") for task in tasks if task.ending is not None]
    ).astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions: npt.NDArray[np.float64] = np.zeros_like(vectors)
    return np.divide(vectors, lengths, out=directions, where=lengths > 0)
