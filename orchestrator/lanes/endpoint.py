"""Reads the URLs of instances of other kinds.

URLs have the form ``KIND+SCHEME://host:port[/model]?tokenizer=DIR&…``. A plain ``host:port`` is a
Triton with Tidegate's own worker, whose card has the other data.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit


class ServerKind(StrEnum):
    """The kind of server at the other end."""

    TIDEGATE = "tidegate"
    VLLM = "vllm"
    LLAMACPP = "llamacpp"
    TGI = "tgi"
    OPENAI = "openai"
    """Any other server with OpenAI's completions."""


_SCHEMES = {
    f"{kind}+{scheme}": kind
    for kind in (ServerKind.VLLM, ServerKind.LLAMACPP, ServerKind.TGI, ServerKind.OPENAI)
    for scheme in ("http", "https")
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One instance of another kind. ``model`` is the model's name at the server, empty if the
    server has only one. ``alias`` is its name for clients, empty for the same name. ``context``
    (tokens) and ``slots`` (concurrent jobs) are 0 to query the server."""

    kind: ServerKind
    name: str
    """The instance's name in the registry."""
    base_url: str
    """Base URL without a slash at the end."""
    tokenizer: Path
    """Folder with ``tokenizer.json``, and other files about the model."""
    model: str = ""
    alias: str = ""
    context: int = 0
    slots: int = 0
    abort_ms: float | None = None
    """Ms that an aborted job may hold its slot; None: the kind's default."""
    weights: str = ""
    """Instances with equal ``weights`` may continue each other's texts; if empty, none may."""
    key_file: Path | None = None
    """File with the server's bearer token; None if it needs none."""


def is_url(entry: str) -> bool:
    return "://" in entry


def name_of(entry: str) -> str:
    return read_endpoint(entry).name if is_url(entry) else entry


def kind_of(entry: str) -> ServerKind:
    return read_endpoint(entry).kind if is_url(entry) else ServerKind.TIDEGATE


def read_endpoint(entry: str) -> Endpoint:
    """Parse a URL entry. Raises ``ValueError`` with the problem and the expected form."""
    scheme, _, rest = entry.partition("://")
    kind = _SCHEMES.get(scheme)
    if kind is None:
        raise ValueError(
            f"there is no kind of instance {scheme[:64]!r}; available: {', '.join(_SCHEMES)}, and "
            "host:port for Tidegate's own"
        )
    shape = f"{scheme}://host:port?tokenizer=DIR"
    parts = urlsplit(f"//{rest}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or parts.username is not None or parts.fragment:
        raise ValueError(f"expected {shape}, got {entry[:256]!r}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    stated = _parameters(parts.query, shape)
    path = unquote(parts.path).strip("/")
    address = f"{host}:{port}"
    base_url = f"{scheme.partition('+')[2]}://{address}/{path}".rstrip("/")
    values = {"name": f"{kind}@{address}"} | stated
    read = {name: _PARAMETERS[name](name, value) for name, value in values.items()}
    return Endpoint(kind=kind, base_url=base_url, **read)


def _parameters(query: str, shape: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    stated = dict(pairs)
    if len(stated) < len(pairs):
        raise ValueError(f"a parameter of {shape} is stated twice")
    for name, value in stated.items():
        if name not in _PARAMETERS:
            raise ValueError(
                f"{name[:64]!r} is not a parameter; available: {', '.join(_PARAMETERS)}"
            )
        if not value:
            raise ValueError(f"{name} is empty; leave it out or give it a value")
    if "tokenizer" not in stated:
        raise ValueError(
            f"expected {shape}: prompts are encoded here, so a folder with the model's "
            "tokenizer.json is needed (and its tokenizer_config.json, for the chat template)"
        )
    return stated


def _path(name: str, text: str) -> Path:
    return Path(text).expanduser()


def _model(name: str, text: str) -> str:
    if not re.fullmatch(r"[^\s?#]{1,256}", text):
        raise ValueError(f"{name} must have 1 to 256 characters without spaces: {text!r}")
    return text


def _name(name: str, text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:@+\[\]-]{1,128}", text, re.ASCII):
        raise ValueError(f"name must be 1 to 128 letters, digits or any of . _ : @ + -: {text!r}")
    return text


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise ValueError(f"{name} must be a whole number above 0, got {text[:32]!r}")
    return int(text)


def _milliseconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be milliseconds from 0 on, got {text[:32]!r}")
    return value


_PARAMETERS: dict[str, Callable[[str, str], Any]] = {
    "tokenizer": _path,
    "model": _model,
    "alias": _model,
    "name": _name,
    "context": _count,
    "slots": _count,
    "abort_ms": _milliseconds,
    "weights": lambda name, text: text,
    "key_file": _path,
}
"""Parsers of the parameters."""
