"""Makes test data of what an agent has sent: short, and without what belongs to one machine."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.support.recording_proxy import Exchange

FOLDER: Final = Path(__file__).parents[3] / "orchestrator" / "api" / "recorded"
_LONGEST_TEXT: Final = 60
_TOOLS: Final = 4
"""Tools that are kept of each request: those that were called, and the first ones."""
_HEADERS: Final = re.compile(
    r"(?i)accept$|content-type|user-agent|originator|anthropic-|x-app$|x-stainless"
)
_ID: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f-]{27}|\b(?:ses|msg|prt|user)_\w{16,}|\b[0-9a-f]{24,}\b"
)


def write(name: str, version: str, exchanges: Sequence[Exchange], home: Path) -> Path:
    """Write the first and the last request with a body; no path of ``home`` is in them."""
    asked = [exchange for exchange in exchanges if exchange.body is not None]
    kept = [asked[0], asked[-1]]
    data = {"client": name, "version": version, "requests": [_request(one, home) for one in kept]}
    file = FOLDER / f"{name}-{version}.json"
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    assert str(home) not in text and "home" not in _paths(text)
    file.write_text(text)
    return file


def _request(exchange: Exchange, home: Path) -> dict[str, Any]:
    headers = {name: value for name, value in exchange.headers.items() if _HEADERS.match(name)}
    body = dict(exchange.body)
    if tools := body.get("tools"):
        called = json.dumps(body.get("messages") or body.get("input"))
        used = [tool for tool in tools if f'"{_name(tool)}"' in called]
        others = [tool for tool in tools if tool not in used]
        # One of each type, since types are what servers stumble over.
        by_type = sorted(others, key=lambda tool: _place(tool, others))
        body["tools"] = [*used, *by_type][:_TOOLS]
    return {
        "method": exchange.method,
        "path": exchange.path,
        "headers": _plain(headers, home),
        "body": _plain(body, home),
    }


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("name") or tool.get("function", {}).get("name"))


def _place(tool: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> int:
    """How many of its type come before a tool."""
    same = [one for one in tools if one.get("type") == tool.get("type")]
    return same.index(tool)


def _plain(value: Any, home: Path) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner, home) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, home) for inner in value]
    if not isinstance(value, str):
        return value
    value = re.sub(rf"{re.escape(str(home.parent))}/[^\s\"'<>]*/", "", value)
    value = _ID.sub("x", value)
    return value if len(value) <= _LONGEST_TEXT else f"({len(value)} characters)"


def _paths(text: str) -> str:
    return " ".join(re.findall(r"/(?:home|tmp|root|Users)/\S*", text))
