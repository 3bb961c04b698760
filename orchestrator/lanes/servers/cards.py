"""Makes model cards for servers without one: from the tokenizer's folder and the server's facts."""

import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from orchestrator.lanes.endpoint import Endpoint
from protocol import Feature, ModelCard, SamplingDefaults
from protocol.sampling import defaults_of
from protocol.tokenizer_files import (
    UnreadableTokenizer,
    read_tokenizer_files,
    special_tokens_of,
)


class BadFolder(ValueError):
    """The folder is unusable; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's facts from its folder. ``context_tokens`` is 0 if no file states it."""

    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    context_tokens: int
    sampling_defaults: SamplingDefaults
    digest: str
    """Hex digest of only the tokenizer: no file here identifies the server's weights."""


def read_folder(path: Path) -> ModelFolder:
    """Read ``tokenizer.json`` and, if present, ``tokenizer_config.json``, ``chat_template.jinja``,
    ``config.json`` and ``generation_config.json``. Takes up to a second. Raises ``BadFolder``."""
    try:
        files = read_tokenizer_files(path)
    except UnreadableTokenizer as error:
        raise BadFolder(str(error)) from None
    try:
        tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise BadFolder(f"{path / 'tokenizer.json'} cannot be read: {error}") from None
    config, generation = (_read(path / f"{name}.json") for name in ("config", "generation_config"))
    text_config = config.get("text_config")
    config = config | text_config if isinstance(text_config, dict) else config
    special = special_tokens_of(files.settings)
    by_name = {
        name: tokenizer.token_to_id(text)
        for name, text in special.items()
        if name in ("bos_token", "eos_token")
    }
    stated = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    own = by_name.get("eos_token")
    ends = (*stated, own) if own is not None and own not in stated else stated
    return ModelFolder(
        tokenizer_json=files.tokenizer_json,
        chat_template=files.chat_template,
        special_tokens=special,
        bos_token_id=by_name.get("bos_token"),
        eos_token_ids=ends,
        vocab_size=count_of(config.get("vocab_size")) or tokenizer.get_vocab_size(),
        context_tokens=count_of(config.get("max_position_embeddings")),
        sampling_defaults=defaults_of(generation).defaults,
        digest=hashlib.sha256(files.tokenizer_json).hexdigest(),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise BadFolder(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise BadFolder(f"{path} must hold a JSON object")
    return value


def _ids(value: object) -> tuple[int, ...]:
    found = value if isinstance(value, list) else [value]
    return tuple(i for i in found if isinstance(i, int) and not isinstance(i, bool) and i >= 0)


def count_of(value: object) -> int:
    """A count of tokens or slots; 0 if ``value`` is not a valid count."""
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return value if 0 < value < 2**31 else 0


ALWAYS_LACKING = frozenset(
    {
        Feature.FINISH,
        Feature.GRAMMAR,
        Feature.KV_EVENTS,
        Feature.PROMPT_LOGPROBS,
        Feature.SESSIONS,
        Feature.STATISTICS,
        Feature.STEP_ABORT,
    }
)
"""Features that all other servers lack: their APIs lack them, or this side does not use them."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's facts, or those of its kind; 0 or empty if unknown."""

    model: str
    engine: str
    version: str
    lacks: Collection[Feature]
    """Features that it lacks in addition to ``ALWAYS_LACKING``."""
    abort_ms: float
    slots: int
    context_tokens: int = 0
    quantization: str = ""


def make_card(endpoint: Endpoint, folder: ModelFolder, told: ServerFacts) -> ModelCard:
    """A card for the server."""
    contexts = [c for c in (endpoint.context, told.context_tokens, folder.context_tokens) if c]
    # An instance without stated weights shares none: equal names do not mean equal files.
    weights = endpoint.weights or f"{endpoint.name} {told.model}"
    is_digest = _DIGEST.fullmatch(endpoint.weights)  # the workers' form
    return ModelCard(
        model=endpoint.alias or told.model,
        context_tokens=min(contexts, default=2048),
        vocab_size=folder.vocab_size,
        tokenizer_json=folder.tokenizer_json,
        chat_template=folder.chat_template,
        special_tokens=folder.special_tokens,
        bos_token_id=folder.bos_token_id,
        eos_token_ids=folder.eos_token_ids,
        block_tokens=0,
        hash_salt=b"",
        engine=told.engine,
        engine_version=told.version,
        engine_digest="",
        model_digest=weights if is_digest else hashlib.sha256(weights.encode()).hexdigest(),
        device="",
        max_running=endpoint.slots or told.slots,
        max_waiting=0,
        min_start_budget_ms=0.0,
        full_context_tokens=folder.context_tokens,
        sampling_defaults=_served(folder.sampling_defaults, told.lacks),
        can_continue=False,
        lacks=tuple(sorted(ALWAYS_LACKING.union(told.lacks))),
        abort_ms=told.abort_ms if endpoint.abort_ms is None else endpoint.abort_ms,
        quantization=told.quantization,
    )


def _served(defaults: SamplingDefaults, lacks: Collection[Feature]) -> SamplingDefaults:
    """``defaults`` without those that the server does not support: no client requested them."""
    unserved = {"repetition_penalty": Feature.PENALTIES, "min_p": Feature.MIN_P}
    left_out = {name: None for name, feature in unserved.items() if feature in lacks}
    return msgspec.structs.replace(defaults, **left_out)
