"""Reads a checkpoint's tokenizer files, in the same way for all users."""

import json
from pathlib import Path
from typing import Any, NamedTuple

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class UnreadableTokenizer(ValueError):
    """A file is missing or invalid; the message names it."""


class TokenizerFiles(NamedTuple):
    """A checkpoint's ``tokenizer.json`` as bytes, ``tokenizer_config.json`` parsed, and chat
    template (Jinja source, empty if the model has none)."""

    tokenizer_json: bytes
    settings: dict[str, Any]
    chat_template: str


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``, or
    ``chat_template.json``, which older models that read images use.

    Only the first must exist. Raises ``UnreadableTokenizer``.
    """
    settings_file, template_file = path / "tokenizer_config.json", path / "chat_template.jinja"
    older_file = path / "chat_template.json"
    file = path / "tokenizer.json"
    try:
        tokenizer_json = file.read_bytes()
        file = settings_file
        settings = json.loads(file.read_text("utf-8")) if file.exists() else {}
        file = template_file
        if file.exists():
            template = file.read_text("utf-8")
        else:
            stated = settings.get("chat_template")
            file = older_file
            if not stated and file.exists():
                stated = json.loads(file.read_text("utf-8"))["chat_template"]
            template = _default_template(stated)
    except FileNotFoundError as error:
        raise UnreadableTokenizer(
            f"{error.filename} is missing; the checkpoint directory must hold tokenizer.json"
        ) from error
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise UnreadableTokenizer(f"{file} cannot be read: {error}") from error
    return TokenizerFiles(tokenizer_json, settings, template)


def special_tokens_of(settings: dict[str, Any]) -> dict[str, str]:
    """The chat template's variables (``bos_token`` …) with their texts."""
    tokens = {}
    for name in _NAMED_TOKENS:
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _default_template(template: Any) -> str:
    """The template in ``chat_template``: a string, or the one named ``default`` in a list."""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template or ""
