"""``/v2/budget``: what a key may spend this month, what it has spent, and on what."""

import re
from collections.abc import Mapping
from typing import Final

from aiohttp import web

from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.responses import json_response
from orchestrator.api.openapi.operation import PLAIN, Operation
from orchestrator.budgets.books import BookEntry, month_ends, month_of
from orchestrator.budgets.budgets import Budgets
from orchestrator.errors import InvalidRequest, NotReady

BUDGETS = web.AppKey("budgets", Budgets)
_MONTH = re.compile(r"\d{4}-(?:0[1-9]|1[0-2])", re.ASCII)
_COLUMNS: Final = tuple(name for name in BookEntry._fields if name != "month")


async def show(request: web.Request) -> web.Response:
    """Show a month of the caller's key; an operator sees every key's. Entries are sums by what
    ``by`` names, ``outcome`` unless stated, of all orchestrators that share a state; of this one
    alone, with a ``fault``, while the others' cannot be read."""
    budgets, key = request.app[BUDGETS], request[CONTEXT].key
    unix = request.app[ORCHESTRATOR].clock.unix()
    month = request.query.get("month", month_of(unix))
    if not _MONTH.fullmatch(month):
        raise InvalidRequest(f"month must be like {month_of(unix)}", field="month")
    by = request.query.get("by", "outcome").split(",")
    if not set(by) <= set(_COLUMNS):
        expected = ", ".join(_COLUMNS)
        raise InvalidRequest(f"by must be some of {expected}, with commas", field="by")
    if not budgets.books.is_open:
        raise NotReady("the books are being opened; try again shortly")
    columns = [name for name in _COLUMNS if name in by]
    whose = None if key.is_admin else key.fingerprint
    spent, fault = await budgets.books.read(month, whose, columns)
    account = budgets.account_of(key.fingerprint)
    budget = account.budget
    return json_response(
        {
            "month": month,
            "tokens_limit": budget.tokens or None,
            "tokens_left": account.tokens_left() if budget.tokens else None,
            "cost_limit": budget.cost or None,
            "cost_left": round(account.cost_left(), 6) if budget.cost else None,
            "resets_unix_ms": round(1000 * month_ends(unix)),
            "spent": spent,
            "fault": f"spent is what this orchestrator knows alone: {fault}" if fault else None,
        }
    )


def routes() -> list[web.RouteDef]:
    return [web.get("/v2/budget", show)]


OPERATIONS: Final[Mapping[str, Operation]] = {"GET /v2/budget": PLAIN}
