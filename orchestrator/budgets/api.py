"""``/v2/budget``: a key's budget for this month, and its spending by category."""

import re
from typing import Final

from aiohttp import web

from orchestrator.api.http.context import CONTEXT, ORCHESTRATOR
from orchestrator.api.http.responses import json_response
from orchestrator.budgets.books import BookEntry, month_ends, month_of
from orchestrator.budgets.budgets import Budgets
from orchestrator.errors import InvalidRequest, NotReady

BUDGETS = web.AppKey("budgets", Budgets)
_MONTH = re.compile(r"\d{4}-(?:0[1-9]|1[0-2])", re.ASCII)
_COLUMNS: Final = tuple(name for name in BookEntry._fields if name != "month")


async def show(request: web.Request) -> web.Response:
    """Show a month's spending of the caller's key, or of every key to operators.
    Entries are sums by the columns in ``by`` (default: ``outcome``) over all orchestrators that
    share a state. If the others' sums are unreadable, only this one's are shown, with ``fault``."""
    budgets, key = request.app[BUDGETS], request[CONTEXT].key
    unix = request.app[ORCHESTRATOR].clock.unix()
    month = request.query.get("month", month_of(unix))
    if not _MONTH.fullmatch(month):
        raise InvalidRequest(f"month must be like {month_of(unix)}", field="month")
    by = request.query.get("by", "outcome").split(",")
    if not set(by) <= set(_COLUMNS):
        expected = ", ".join(_COLUMNS)
        raise InvalidRequest(f"by must be a comma-separated list from {expected}", field="by")
    if not budgets.books.is_open:
        raise NotReady("the books are not open yet; try again shortly")
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
            "fault": f"spent is only from this orchestrator: {fault}" if fault else None,
        }
    )


def routes() -> list[web.RouteDef]:
    return [web.get("/v2/budget", show)]
