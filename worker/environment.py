"""Settings read from the environment; a variable that no setting has is an error, not ignored.

A setting's variable is its name in capitals with two underscores for each dot: the variable of
``queue.max_waiting`` is ``TIDEGATE_QUEUE__MAX_WAITING``.
"""

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsError

from worker.encoding import readable

S = TypeVar("S", bound=BaseSettings)

DELIMITER: Final = "__"
"""Replaces the dots of a setting's name in the environment."""
_PAGE: Final = Path(__file__).parents[1] / "docs" / "settings.md"
"""Page with all settings, in a checkout."""
_SERVICE_LINKS = re.compile(r"SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?")
"""Variables that Kubernetes adds for a service of the same name, without their prefix."""
_FIELD = re.compile(r'field "(\w+)"')
"""Matches the field name in pydantic's error about invalid JSON."""


class Section(BaseModel):
    """A group of related settings: a table in ``tidegate.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _by_commas(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_by_commas)]
"""Strings, or one string that separates them with commas."""


class EnvironmentSettings(BaseSettings):
    """Settings as Unicode, even if the environment was read as ASCII."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_readable(cls, value: object) -> object:
        if isinstance(value, dict):
            return {readable(name): cls._is_readable(each) for name, each in value.items()}
        return readable(value) if isinstance(value, str) else value


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section type of a field of this type, if it is a section."""
    if get_origin(annotation) in (Union, UnionType):
        found = [each for each in map(section_of, get_args(annotation)) if each is not None]
        return found[0] if found else None
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None


def _walk(kind: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo, bool]]:
    """Dotted names of all settings and sections of ``kind``, each with its field and whether it is
    a section. A section precedes its contents."""
    for name, field in kind.model_fields.items():
        section = section_of(field.annotation)
        yield f"{above}{name}", field, section is not None
        if section is not None:
            yield from _walk(section, f"{above}{name}.")


@cache
def names_of(kind: type[BaseModel]) -> Collection[str]:
    """Names of all settings and sections of ``kind``: ``queue``, ``queue.max_waiting``, …"""
    return tuple(name for name, _, _ in _walk(kind))


@cache
def fields_of(kind: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Fields of all settings of ``kind`` by their dotted names, without sections' own fields."""
    return {name: field for name, field, is_section in _walk(kind) if not is_section}


def values_of(settings: BaseModel) -> dict[str, object]:
    """Values of all settings by their dotted names; None for those of a section that is None."""
    values: dict[str, object] = {}
    for name in fields_of(type(settings)):
        value: object = settings
        for part in name.split("."):
            value = getattr(value, part, None)
        values[name] = value
    return values


def guide_to(kind: type[BaseModel]) -> str:
    """The file that documents the settings of ``kind``; a wheel has no documents."""
    return "docs/settings.md" if _PAGE.is_file() else str(sys.modules[kind.__module__].__file__)


def problem_of(name: str, kind: type[BaseModel], what: str = "a setting") -> str:
    """Error if ``name`` is not a setting of ``kind``, called ``what``; empty if it is one."""
    known = fields_of(kind)
    if name in known:
        return ""
    near = get_close_matches(name, known, 1)
    return f"not {what}; " + (f"did you mean {near[0]}?" if near else f"see {guide_to(kind)}")


def variable_of(prefix: str, name: str) -> str:
    """The environment variable of a setting's dotted name."""
    return f"{prefix}{name.replace('.', DELIMITER)}".upper()


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Convert values by names such as ``queue__max_waiting`` to an object of objects."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        *sections, own = name.split(DELIMITER)
        table = made
        for section in sections:
            table = table.setdefault(section, {})
        table[own] = value
    return made


def unknown_variables(kind: type[BaseSettings], others: Collection[str] = ()) -> list[str]:
    """One line for each variable with the prefix of ``kind`` that is neither its setting nor in
    ``others``: full variable names, or prefixes that end in _."""
    prefix = str(kind.model_config["env_prefix"])
    stem = f"{prefix.rstrip('_')}_"
    known = {variable_of(prefix, name) for name in names_of(kind)}
    exact = {name for name in others if not name.endswith("_")}
    beginnings = tuple(name for name in others if name.endswith("_"))
    lines = []
    for name in sorted(os.environ):
        upper = name.upper()
        if not upper.startswith(stem) or upper in exact or upper in known:
            continue
        if upper.startswith(beginnings) or _SERVICE_LINKS.fullmatch(upper.removeprefix(stem)):
            continue
        near = get_close_matches(upper, [*known, *exact], 1)
        instead = f"did you mean {near[0]}?" if near else f"see {guide_to(kind)}"
        lines.append(f"{name}: not a setting; {instead}")
    return lines


def explained(kind: type[BaseSettings], error: ValidationError) -> list[str]:
    """One line for each error, with the variable of the wrong setting."""
    prefix = str(kind.model_config["env_prefix"])
    known = frozenset(names_of(kind))
    values = frozenset(fields_of(kind))
    variables = {name.upper() for name in os.environ}
    lines = []
    for detail in error.errors():
        message = detail["msg"].removeprefix("Value error, ")
        path = [str(part) for part in detail["loc"]]
        name = ".".join(path)
        is_unknown = detail["type"] in ("extra_forbidden", "unexpected_keyword_argument")
        if is_unknown and variable_of(prefix, name) in variables:
            continue  # ``unknown_variables`` has a line for it
        if is_unknown:
            message = f"not a setting; see {guide_to(kind)}"
            if not any(".".join(path[:end]) in values for end in range(1, len(path))):
                lines.append(f"{name}: {message}")
                continue
        inside = list[str]()
        while path and ".".join(path) not in known:  # a value inside a setting
            inside.insert(0, path.pop())
        if inside:
            message = f"{'.'.join(inside)}: {message}"
        first, _, rest = message.partition(": ")
        if ".".join([*path, first]) in known:  # a check of several settings names one of them
            path, message = [*path, first], rest
        lines.append(f"{variable_of(prefix, '.'.join(path))}: {message}")
    return lines


def unreadable(kind: type[BaseSettings], error: SettingsError) -> str:
    """A line for a variable with invalid JSON."""
    found = _FIELD.search(str(error))
    if found is None:
        return str(error)
    return f"{variable_of(str(kind.model_config['env_prefix']), found[1])}: expected JSON"


def read_environment(kind: type[S], what: str) -> S:
    """Read settings from the environment. Raises ``ValueError`` that names each wrong variable;
    ``what`` names the settings in that message."""
    lines = unknown_variables(kind)
    settings: S | None = None
    try:
        settings = kind()
    except SettingsError as error:
        lines = lines or [unreadable(kind, error)]
    except ValidationError as error:
        lines += explained(kind, error)
    if lines or settings is None:
        raise ValueError(f"{what} are invalid: " + "; ".join(lines))
    return settings


def with_variables(kind: type[S], variables: Mapping[str, str]) -> S:
    """Settings of a process that is started with ``variables`` over this one's environment. Raises
    ``ValueError``."""
    stated = EnvSettingsSource(kind)
    stated.env_vars = {name.lower(): value for name, value in variables.items()}
    return kind(**stated())
