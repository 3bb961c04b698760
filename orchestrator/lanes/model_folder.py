"""Reads a folder with a tokenizer for facts about the model that another kind of server runs."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from protocol import SamplingDefaults
from protocol.sampling import defaults_of
from protocol.tokenizer_files import (
    UnreadableTokenizer,
    read_tokenizer_files,
    special_tokens_of,
)


class BadFolder(ValueError):
    """The folder cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Facts about a model, from its folder. ``context_tokens`` is 0 if no file says it."""

    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    context_tokens: int
    sampling_defaults: SamplingDefaults
    digest: str
    """Hex digest of the tokenizer alone: nothing here says which weights the server has."""


def read_folder(path: Path) -> ModelFolder:
    """Read ``tokenizer.json`` and, if present, ``tokenizer_config.json``, ``chat_template.jinja``,
    ``config.json`` and ``generation_config.json``. Takes up to a second.

    Raises ``BadFolder``.
    """
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
        vocab_size=_count(config.get("vocab_size")) or tokenizer.get_vocab_size(),
        context_tokens=_count(config.get("max_position_embeddings")),
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


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
