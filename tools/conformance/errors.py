"""Errors: requests that cannot be read, and what their answers look like."""

import json
from typing import Any, Final

from .rules import Finding, judged, unmeasured
from .server import Server, together

_CASES: Final[dict[str, bytes | dict[str, Any]]] = {
    "a body that is not JSON": b'{"model": ',
    "messages that are a number": {"messages": 5},
    "a max_tokens that is a word": {"max_tokens": "many"},
    "the same, streamed": {"max_tokens": "many", "stream": True},
}


async def check(server: Server) -> list[Finding]:
    wrong, shapeless, refused = [], [], 0
    usual = {"model": server.target.model, "messages": [{"role": "user", "content": "Hello."}]}
    for what, case in _CASES.items():
        body = case if isinstance(case, bytes) else json.dumps(usual | case).encode()
        sent = server.send("/chat/completions", server.patience_s, body)
        (answer,) = await together([sent])
        refused += answer.is_refused
        if not 400 <= answer.status < 500:
            wrong.append(f"{what}: {answer.outcome()}")
        if answer.is_refused and not answer.has_error_object:
            shapeless.append(f"{what}: {answer.body[:80].decode(errors='replace')!r}")
    every = f"{len(_CASES)} of {len(_CASES)} refused with 4xx"
    status = judged("errors.status", not wrong, "; ".join(wrong) or every)
    if not refused:
        return [status, unmeasured("errors.shape", "nothing was refused")]
    said = "; ".join(shapeless) or f"{refused} of {refused} error objects"
    return [status, judged("errors.shape", not shapeless, said)]
