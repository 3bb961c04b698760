"""``/v1/batches``: the requests of a file, served in the background within one deadline."""

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.responses import json_response
from orchestrator.batches.api.files import page_of
from orchestrator.batches.api.served_lines import batches_of, owner_of
from orchestrator.batches.folder import new_id
from orchestrator.batches.records import LineOutcome, Status, StoredBatch
from orchestrator.batches.service import new_batch, read_window
from orchestrator.errors import InvalidRequest

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_MAX_PER_PAGE = 100
_FIRST = Status.VALIDATING
_METADATA_CHARS = 16 * (64 + 512)
"""Most characters of ``metadata``: as in OpenAI's 16 pairs of 64 and 512 characters."""


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body to create a batch. ``completion_window``: a number and one of s m h d, at most 7d."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


async def create(request: web.Request) -> web.Response:
    """Create a batch from the requests in a file."""
    batches, owner = batches_of(request), owner_of(request)
    body = await read_body(request, BatchRequest, _checked)
    file = await batches.file(owner, body.input_file_id)
    if file.purpose != "batch":
        raise InvalidRequest(
            f"the file's purpose is {file.purpose}; expected batch", field="input_file_id"
        )
    batch = new_batch(
        batches.shop.time,
        id=new_id("batch_"),
        owner=owner,
        input_id=file.id,
        endpoint=body.endpoint,
        window=body.completion_window,
        window_s=read_window(body.completion_window),
        keep_s=batches.config.keep_s,
        metadata=body.metadata or {},
    )
    return json_response(shape(await batches.create(batch)))


async def batches(request: web.Request) -> web.Response:
    """List the key's batches, newest first."""
    own = await batches_of(request).batches(owner_of(request))
    return json_response(page_of(own, request.query, shape, most=_MAX_PER_PAGE))


async def retrieve(request: web.Request) -> web.Response:
    """Show one batch and its progress."""
    name = request.match_info["batch_id"]
    return json_response(shape(await batches_of(request).batch(owner_of(request), name)))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a batch. No more of its requests start. Results so far are kept."""
    name = request.match_info["batch_id"]
    return json_response(shape(await batches_of(request).cancel(owner_of(request), name)))


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/batches", create),
        web.get("/v1/batches", batches),
        web.get("/v1/batches/{batch_id}", retrieve),
        web.post("/v1/batches/{batch_id}/cancel", cancel),
    ]


def shape(batch: StoredBatch) -> dict[str, object]:
    succeeded = batch.count(LineOutcome.SUCCEEDED)
    failed = sum(batch.counts.values()) - succeeded
    errors = [msgspec.to_builtins(error) for error in batch.errors]
    is_over = batch.status.is_over
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_id,
        "completion_window": batch.window,
        "status": batch.status.value,
        "output_file_id": batch.output_id if is_over and succeeded else None,
        "error_file_id": batch.errors_id if is_over and failed else None,
        "created_at": int(batch.made.unix),
        "expires_at": int(batch.made.unix + batch.window_s),
        **{f"{it.value}_at": batch.times.get(it.value) for it in Status if it is not _FIRST},
        "request_counts": {"total": batch.total, "completed": succeeded, "failed": failed},
        "metadata": batch.metadata or None,
    }


def _checked(body: BatchRequest) -> BatchRequest:
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", field="endpoint")
    if sum(len(key) + len(value) for key, value in (body.metadata or {}).items()) > _METADATA_CHARS:
        raise InvalidRequest(
            f"metadata must have at most {_METADATA_CHARS} characters", field="metadata"
        )
    return body
