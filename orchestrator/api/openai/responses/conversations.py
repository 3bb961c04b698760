"""``/v1/conversations``: conversations that responses read and add to."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.decode import Reader
from orchestrator.api.http.fields import NULL
from orchestrator.api.http.responses import json_response
from orchestrator.api.openai.responses.conversation_store import Conversation, ConversationStore
from orchestrator.api.openai.responses.items import InputItem, turns_of
from orchestrator.api.openai.responses.kept_items import KeptItem, items_of_input, page_of_items
from orchestrator.api.openai.responses.types import read_metadata
from orchestrator.errors import InvalidRequest, NotFound
from orchestrator.tasks.job import Message

_MAX_ITEMS_AT_ONCE = 20


class MetadataRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/conversations/{id}``."""

    metadata: msgspec.Raw


class ItemsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/conversations/{id}/items``."""

    items: list[InputItem]


class ConversationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/conversations``."""

    items: list[InputItem] | None = None
    metadata: msgspec.Raw = NULL


CONVERSATIONS = web.AppKey("conversations", ConversationStore)

_create_reader = Reader(ConversationRequest)
_metadata_reader = Reader(MetadataRequest)
_items_reader = Reader(ItemsRequest)


async def create(request: web.Request) -> web.Response:
    """Begin a conversation, with items if there are any yet."""
    created = int(request[CONTEXT].arrival.unix)

    def begin(body: ConversationRequest) -> Conversation:
        conversation = Conversation(
            created, read_metadata(body.metadata), f"conv_{request.app[ORCHESTRATOR].ids.new()}"
        )
        conversation.add(_new_items(body.items or ()))
        return conversation

    conversation = await read_body(request, _create_reader, begin)
    request.app[CONVERSATIONS].create(request[CONTEXT].key.fingerprint, conversation)
    return json_response(conversation.body())


async def retrieve(request: web.Request) -> web.Response:
    """Show a conversation, without its items."""
    return json_response(_conversation(request).body())


async def update(request: web.Request) -> web.Response:
    """Replace a conversation's metadata."""
    metadata = await read_body(request, _metadata_reader, lambda body: read_metadata(body.metadata))
    conversation = _conversation(request)
    conversation.metadata = metadata
    request.app[CONVERSATIONS].keep(request[CONTEXT].key.fingerprint, conversation)
    return json_response(conversation.body())


async def delete(request: web.Request) -> web.Response:
    """Delete a conversation with its items."""
    key, name = _named(request)
    request.app[CONVERSATIONS].delete(key, name)
    return json_response({"id": name, "object": "conversation.deleted", "deleted": True})


async def create_items(request: web.Request) -> web.Response:
    """Add items to a conversation."""
    items = await read_body(request, _items_reader, lambda body: _new_items(body.items))
    request.app[CONVERSATIONS].add(*_named(request), items)
    return json_response(page_of_items(items, {"order": "asc", "limit": str(_MAX_ITEMS_AT_ONCE)}))


async def list_items(request: web.Request) -> web.Response:
    """List a conversation's items, a page at a time."""
    return json_response(page_of_items([*_conversation(request).items.values()], request.query))


async def retrieve_item(request: web.Request) -> web.Response:
    """Show one item of a conversation."""
    return json_response(_item(request, _conversation(request)).body())


async def delete_item(request: web.Request) -> web.Response:
    """Delete one item of a conversation; shows the conversation."""
    conversation = _conversation(request)
    conversation.remove(_item(request, conversation).id)
    request.app[CONVERSATIONS].keep(request[CONTEXT].key.fingerprint, conversation)
    return json_response(conversation.body())


def routes() -> list[web.RouteDef]:
    one = "/v1/conversations/{conversation_id}"
    return [
        web.post("/v1/conversations", create),
        web.get(one, retrieve),
        web.post(one, update),
        web.delete(one, delete),
        web.post(f"{one}/items", create_items),
        web.get(f"{one}/items", list_items),
        web.get(f"{one}/items/{{item_id}}", retrieve_item),
        web.delete(f"{one}/items/{{item_id}}", delete_item),
    ]


def _new_items(items: Sequence[InputItem]) -> list[KeptItem]:
    """A client's items as they are kept. Raises ``InvalidRequest`` for what is not served."""
    if len(items) > _MAX_ITEMS_AT_ONCE:
        raise InvalidRequest(f"items must be at most {_MAX_ITEMS_AT_ONCE} at a time", field="items")
    turns = turns_of(items, "items")
    if any(isinstance(turn, Message) and turn.parts for turn in turns.turns):
        raise InvalidRequest(
            "items: a conversation keeps no images; send them in the input of a response",
            field="items",
        )
    if turns.has_references:
        raise InvalidRequest(
            "items: item_reference is not served here; send the item itself", field="items"
        )
    return items_of_input(items)


def _named(request: web.Request) -> tuple[str, str]:
    return request[CONTEXT].key.fingerprint, request.match_info["conversation_id"]


def _conversation(request: web.Request) -> Conversation:
    return request.app[CONVERSATIONS].get(*_named(request))


def _item(request: web.Request, conversation: Conversation) -> KeptItem:
    name = request.match_info["item_id"]
    if name not in conversation.items:
        raise NotFound(f"there is no item {name[:64]!r} in this conversation")
    return conversation.items[name]
