"""``GET /openapi.json``: OpenAPI 3.1 of every route, made from the types that bodies are read into.

What a request may say is what its decoder takes; checks that need more than a type (a number's
range, the model's context) answer 400. Answers are objects in the dialects' own shapes, which their
SDKs describe in full, and are not spelled out a second time here.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from aiohttp import web

from orchestrator.api.http.context import DIALECTS, Dialect
from orchestrator.api.openapi.operations import JSON, OPERATIONS, Operation
from orchestrator.errors import TidegateError

DOCUMENT = web.AppKey("openapi", dict[str, bytes])
_REF = "#/components/schemas/{name}"
_METHODS_TOLD = ("GET", "POST", "DELETE")
_NO_WORD = re.compile(r"\W+")
_IN_PATH = re.compile(r"{(\w+)}")


class MissingOperation(LookupError):
    """A route that ``OPERATIONS`` does not describe."""


async def openapi(request: web.Request) -> web.Response:
    """This document."""
    kept = request.app[DOCUMENT]
    if not kept:
        kept["body"] = msgspec.json.encode(await asyncio.to_thread(document_of, request.app))
    return web.Response(body=kept["body"], content_type=JSON)


def routes() -> list[web.RouteDef]:
    return [web.get("/openapi.json", openapi)]


def document_of(app: web.Application) -> dict[str, Any]:
    """Of all routes of ``app``. Raises ``MissingOperation``."""
    found = [
        (route.method, route.resource.canonical, route.handler)
        for route in app.router.routes()
        if route.resource is not None and route.method in _METHODS_TOLD
    ]
    for method, path, _ in found:
        if f"{method} {path}" not in OPERATIONS:
            raise MissingOperation(
                f"{method} {path} is served and not described: add it to OPERATIONS in "
                "orchestrator.api.openapi.operations.py"
            )
    bodies = {one.body for one in OPERATIONS.values() if one.body is not None}
    plain = _Plain()
    refs, components = _schemas({body: plain.of(body) for body in bodies})
    statuses = sorted({kind.status for kind in _kinds(TidegateError)} | {500})
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in found:
        operation = OPERATIONS[f"{method} {path}"]
        dialect = next((one for one in app[DIALECTS] if one.serves(path)), app[DIALECTS][-1])
        told = _told(operation, path, refs)
        told["summary"] = (handler.__doc__ or "").strip().partition("\n")[0]
        told["operationId"] = method.lower() + _NO_WORD.sub("_", path)
        told["responses"] |= {str(status): _error(dialect) for status in statuses}
        told["responses"] |= _fine(operation)
        paths.setdefault(path, {})[method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidegate",
            "version": "2",
            "description": "Deadline-keeping inference: OpenAI's, Anthropic's, KServe's and an "
            "API of its own over the same tasks.",
        },
        "paths": paths,
        "components": {
            "schemas": components | {"Error": {"type": "object"}},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _told(operation: Operation, path: str, refs: Mapping[type, Any]) -> dict[str, Any]:
    text = {"schema": {"type": "string"}}
    told: dict[str, Any] = {"responses": {}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _IN_PATH.findall(path)
    ]
    parameters += [{"name": name, "in": "query", **text} for name in operation.parameters]
    if operation.body is not None:
        parameters.append(
            {"name": "X-Timeout-Ms", "in": "header", "schema": {"type": "integer", "minimum": 1}}
        )
        told["requestBody"] = {
            "required": not operation.body_is_optional,
            "content": {JSON: {"schema": refs[operation.body]}},
        }
    if parameters:
        told["parameters"] = parameters
    return told


def _fine(operation: Operation) -> dict[str, Any]:
    content = {
        kind: {"schema": {"type": "object" if kind == JSON else "string"}}
        for kind in operation.gives
    }
    return {
        str(status): {"description": "The answer", "content": content}
        for status in operation.statuses
    }


def _error(dialect: Dialect) -> dict[str, Any]:
    """In the dialect's shape: that of an example."""
    example = dialect.error_body(TidegateError("an internal error occurred"), "an-id")
    return {
        "description": "An error",
        "content": {JSON: {"schema": _shape_of(example)}},
    }


def _shape_of(example: object) -> dict[str, Any]:
    """The schema of what has an example's fields; null may be anything."""
    if isinstance(example, Mapping):
        return {
            "type": "object",
            "properties": {name: _shape_of(value) for name, value in example.items()},
            "required": [name for name, value in example.items() if value is not None],
        }
    kinds: Mapping[type, str] = {bool: "boolean", str: "string", int: "integer", float: "number"}
    kind = kinds.get(type(example))
    return {} if kind is None else {"type": kind}


def _schemas(plain: Mapping[type, Any]) -> tuple[dict[type, Any], dict[str, Any]]:
    refs, components = msgspec.json.schema_components(plain.values(), ref_template=_REF)
    return dict(zip(plain, refs, strict=True)), dict(components)


def _kinds(kind: type[TidegateError]) -> Iterable[type[TidegateError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


class _Plain:
    """Message types as msgspec can describe them: what is left as raw JSON may be anything."""

    def __init__(self) -> None:
        self._made: dict[type, Any] = {}

    def of(self, kind: Any) -> Any:
        """``kind``, or what stands for it."""
        if kind is msgspec.Raw:
            return Any
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind not in self._made:
                self._made[kind] = self._struct(kind)
            return self._made[kind]
        origin, parts = get_origin(kind), get_args(kind)
        if origin is None or origin is Literal or not parts:
            return kind
        if origin is Annotated:
            return Annotated[(self.of(parts[0]), *parts[1:])]
        inner = tuple(part if part is ... else self.of(part) for part in parts)
        if origin in (Union, UnionType):
            return Any if Any in inner else reduce(or_, inner)
        return origin[inner]

    def _struct(self, kind: type[msgspec.Struct]) -> Any:
        config = kind.__struct_config__
        fields: list[Any] = []
        for field in msgspec.structs.fields(kind):
            default: Any = field.default
            if isinstance(default, msgspec.Raw):
                default = None
            made = (
                msgspec.field(name=field.encode_name, default_factory=field.default_factory)
                if field.default_factory is not msgspec.NODEFAULT
                else msgspec.field(name=field.encode_name, default=default)
            )
            fields.append((field.name, self.of(field.type), made))
        return msgspec.defstruct(
            kind.__name__,
            fields,
            module=kind.__module__,
            namespace={"__doc__": kind.__doc__},
            tag=config.tag,
            tag_field=config.tag_field,
            forbid_unknown_fields=config.forbid_unknown_fields,
            array_like=config.array_like,
            kw_only=True,
        )
