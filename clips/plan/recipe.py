"""The recipe of a clip, which its client writes as JSON with a versioned schema.

``1.x`` is accepted for any ``x``. Unknown fields of a later minor version are ignored. In our
version and earlier ones, an unknown field is an error that names it.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, get_type_hints

import msgspec
from msgspec import Meta

from protocol.outcomes import RequestError


class RecipeError(RequestError):
    """A recipe that cannot be rendered; ``field``: dotted path to the fault, "" for all."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"recipe.{field}: {message}" if field else f"recipe: {message}")
        self.field = field


MAJOR: Final = 1
MINOR: Final = 1
MAX_TEXT: Final = 1_000
"""Maximum characters of text: about a minute of speech, more than the longest clip holds."""
MAX_PROMPT: Final = 500
MAX_BYTES: Final = 64 * 1024
"""Maximum bytes of a recipe's JSON: ten times the size of all fields, for later versions."""

_Version = re.compile(r"(\d{1,4})\.(\d{1,4})")
_FIELD = re.compile(r"(unknown|missing required) field `(\w+)`")
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")


class Voice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the text is spoken. ``rate``: 1 is the voice's natural rate."""

    name: Annotated[str, Meta(max_length=64, pattern=r"^[\w+/-]*$")] = ""
    """One of the provider's voices; empty: its default."""
    rate: Annotated[float, Meta(ge=0.5, le=2.0)] = 1.0
    pitch: Annotated[float, Meta(ge=0.5, le=2.0)] = 1.0


class Portrait(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The person who speaks. Equal prompts and seeds give equal faces."""

    prompt: Annotated[str, Meta(max_length=MAX_PROMPT)] = "a friendly host"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class Video(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The picture. ``size``: pixels of either side; 0: the service's own. ``seconds``: at most."""

    fps: Annotated[int, Meta(ge=6, le=30)] = 24
    size: Annotated[int, Meta(ge=0, le=1024, multiple_of=32)] = 0
    seconds: Annotated[float, Meta(ge=0.5, le=45)] = 45.0


class CheckWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether keyframes are compared with the portrait's prompt."""

    enabled: bool = True


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All inputs of one clip."""

    schema: str
    text: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
    voice: Voice = Voice()
    portrait: Portrait = Portrait()
    video: Video = Video()
    check: CheckWanted = CheckWanted()


def read_recipe(data: bytes | str | Mapping[str, Any]) -> Recipe:
    """Parse and check a recipe. Raises ``RecipeError`` that names the field."""
    if isinstance(data, bytes | str):
        if len(data) > MAX_BYTES:
            raise RecipeError("", f"has at most {MAX_BYTES} bytes, not {len(data)}")
        try:
            data = msgspec.json.decode(data)
        except RecursionError:
            raise RecipeError("", "is nested too deeply") from None
        except (msgspec.DecodeError, UnicodeError) as error:
            raise RecipeError("", f"not valid JSON: {error}") from None
    if not isinstance(data, Mapping):
        raise RecipeError("", "must be a JSON object")
    if _minor(data) > MINOR:
        data = _known(data, Recipe)
    try:
        recipe = msgspec.convert(data, Recipe)
    except msgspec.ValidationError as error:
        raise _where(str(error)) from None
    if not any(each.isprintable() and not each.isspace() for each in recipe.text):
        raise RecipeError("text", "there is nothing to say: must have more than blanks")
    return recipe


def _minor(data: Mapping[str, Any]) -> int:
    version = data.get("schema")
    if version is None:
        raise RecipeError("schema", f'is missing; this service renders "{MAJOR}.{MINOR}"')
    found = _Version.fullmatch(version) if isinstance(version, str) else None
    if found is None:
        raise RecipeError("schema", f'must be a version such as "{MAJOR}.{MINOR}"')
    if int(found[1]) != MAJOR:
        raise RecipeError("schema", f"{found[0]} is not served here; {MAJOR}.x is")
    return int(found[2])


def _known(data: Mapping[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """``data`` without the fields that ``struct`` does not have, at any depth."""
    kinds = get_type_hints(struct)
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if name not in kinds:
            continue
        kind = kinds[name]
        is_nested = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        kept[name] = _known(value, kind) if is_nested and isinstance(value, Mapping) else value
    return kept


def _where(message: str) -> RecipeError:
    """A ``RecipeError`` of msgspec's message, with the field found in it."""
    place = _PLACE.search(message)
    field = place[1] if place else ""
    what = message[: place.start()] if place else message
    if found := _FIELD.search(what):
        field = ".".join(filter(None, (field, found[2])))
        what = "unknown field" if found[1] == "unknown" else "is missing"
    return RecipeError(field, what[:1].lower() + what[1:])
