"""Parses an operator's settings for a third-party engine, by that engine's own names."""

import json
import shlex


def read_engine_args(text: str) -> dict[str, str]:
    """Parse ``name=value`` pairs with blanks between them (quoted as in a shell), or a JSON object.

    Names come out with underscores, however they were written (``--max-num-seqs``), values as text:
    what they may be only the engine knows. Raises ``ValueError`` that says what is wrong.
    """
    text = text.strip()
    if text.startswith("{"):
        return _from_json(text)
    pairs: dict[str, str] = {}
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(
                f"expected name=value pairs with blanks between them, or a JSON object: {word!r} is"
                " no pair"
            )
        _put(pairs, name, value)
    return pairs


def _from_json(text: str) -> dict[str, str]:
    try:
        stated = json.loads(text)
    except ValueError as error:
        raise ValueError(f"starts with {{ but is not valid JSON: {error}") from None
    pairs: dict[str, str] = {}
    for name, value in stated.items():
        _put(pairs, name, value if isinstance(value, str) else json.dumps(value))
    return pairs


def _put(pairs: dict[str, str], name: str, value: str) -> None:
    known = name.strip().removeprefix("--").replace("-", "_")
    if known in pairs:
        raise ValueError(f"{known} is given twice")
    pairs[known] = value
