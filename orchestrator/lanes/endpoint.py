"""Reads the names of instances of other kinds: one URL each, with all that must be known.

URLs have the form ``KIND+SCHEME://host:port[/model]?tokenizer=DIR&…``. A plain ``host:port`` is a
Triton with Tidegate's own worker, whose card says the rest.
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit


class ServerKind(StrEnum):
    """The kind of server at the other end."""

    TIDEGATE = "tidegate"
    TRITON = "triton"
    """A Triton LLM backend over its plain contract: vllm_backend, tensorrtllm_backend."""
    VLLM = "vllm"
    LLAMACPP = "llamacpp"
    TGI = "tgi"


_SCHEMES = {
    "triton+grpc": ServerKind.TRITON,
    "vllm+http": ServerKind.VLLM,
    "vllm+https": ServerKind.VLLM,
    "llamacpp+http": ServerKind.LLAMACPP,
    "llamacpp+https": ServerKind.LLAMACPP,
    "tgi+http": ServerKind.TGI,
    "tgi+https": ServerKind.TGI,
}
_PARAMETERS = (
    "tokenizer",
    "model",
    "alias",
    "name",
    "context",
    "slots",
    "abort_ms",
    "weights",
    "key_file",
)
_NAME = re.compile(r"[A-Za-z0-9._:@+\[\]-]{1,128}", re.ASCII)
_MODEL = re.compile(r"[^\s?#]{1,256}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One instance of another kind.

    ``model`` is the model's name at the server, empty if the server has only one; ``alias`` is its
    name for clients, empty for the same. ``context`` (tokens) and ``slots`` (jobs at once) are 0 if
    the server is to be asked for them.
    """

    kind: ServerKind
    name: str
    """The instance's name in the registry."""
    host: str
    """``host:port``."""
    base_url: str
    """Base URL without a slash at the end, over HTTP; empty for gRPC."""
    tokenizer: Path
    """Folder with ``tokenizer.json``, and other files about the model."""
    model: str = ""
    alias: str = ""
    context: int = 0
    slots: int = 0
    abort_ms: float | None = None
    """Ms that a job that was given up may hold its slot; None: as is usual for the kind."""
    weights: str = ""
    """Instances of equal ``weights`` may go on with each other's texts; if empty, none may."""
    key_file: Path | None = None
    """File with the bearer token that the server asks for; None if it asks for none."""


def is_url(entry: str) -> bool:
    return "://" in entry


def name_of(entry: str) -> str:
    return read_endpoint(entry).name if is_url(entry) else entry


def kind_of(entry: str) -> ServerKind:
    return read_endpoint(entry).kind if is_url(entry) else ServerKind.TIDEGATE


def read_endpoint(entry: str) -> Endpoint:
    """Read a URL entry. Raises ``ValueError`` that says what is wrong and what was expected."""
    scheme, _, rest = entry.partition("://")
    kind = _SCHEMES.get(scheme)
    if kind is None:
        raise ValueError(
            f"no kind of instance is called {scheme[:64]!r}; available: {', '.join(_SCHEMES)}, and "
            "host:port for Tidegate's own"
        )
    shape = f"{scheme}://host:port{'/model' if kind is ServerKind.TRITON else ''}?tokenizer=DIR"
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
    model = stated.get("model", "")
    if kind is ServerKind.TRITON:
        if path and model and path != model:
            raise ValueError(f"{shape} names its model twice: {path!r} and {model!r}")
        model = model or path
        if not model:
            raise ValueError(f"expected {shape}: which of Triton's models is meant?")
        path = ""
    for field in ("model", "alias"):
        value = model if field == "model" else stated.get(field, "")
        if value and not _MODEL.fullmatch(value):
            raise ValueError(f"{field} must have 1 to 256 characters without spaces: {value!r}")
    address = f"{host}:{port}"
    name = stated.get("name", "")
    if not name:
        what = f"{kind}-{_named(model)}" if kind is ServerKind.TRITON else str(kind)
        name = f"{what}@{address}"
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must be 1 to 128 letters, digits or any of . _ : @ + -: {name!r}")
    return Endpoint(
        kind=kind,
        name=name,
        host=address,
        base_url=""
        if kind is ServerKind.TRITON
        else f"{scheme.partition('+')[2]}://{address}" + (f"/{path}" if path else ""),
        tokenizer=Path(stated["tokenizer"]).expanduser(),
        model=model,
        alias=stated.get("alias", ""),
        context=_count(stated, "context"),
        slots=_count(stated, "slots"),
        abort_ms=_milliseconds(stated, "abort_ms"),
        weights=stated.get("weights", ""),
        key_file=Path(stated["key_file"]).expanduser() if "key_file" in stated else None,
    )


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
            raise ValueError(f"{name} is stated and empty; leave it out or give it a value")
    if "tokenizer" not in stated:
        raise ValueError(
            f"expected {shape}: prompts are encoded here, so a folder with the model's "
            "tokenizer.json is needed (and its tokenizer_config.json, for the chat template)"
        )
    return stated


def _named(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", model)[:64]


def _count(stated: dict[str, str], name: str) -> int:
    text = stated.get(name)
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise ValueError(f"{name} must be a whole number above 0, got {text[:32]!r}")
    return int(text)


def _milliseconds(stated: dict[str, str], name: str) -> float | None:
    text = stated.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be milliseconds from 0 on, got {text[:32]!r}")
    return value
