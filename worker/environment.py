"""Reads settings from the environment; a variable that no setting has is an error, not ignored."""

import os
import re
from collections.abc import Collection
from difflib import get_close_matches
from typing import TypeVar

from pydantic import ValidationError, field_validator
from pydantic_settings import BaseSettings

from worker.encoding import readable

S = TypeVar("S", bound=BaseSettings)

_SERVICE_LINKS = re.compile(r"SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?")
"""Variables that Kubernetes adds for a service of the same name, without their prefix."""


class EnvironmentSettings(BaseSettings):
    """Settings whose texts are Unicode, even where the environment was read as ASCII."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_readable(cls, value: object) -> object:
        if isinstance(value, dict):
            return {readable(name): cls._is_readable(each) for name, each in value.items()}
        return readable(value) if isinstance(value, str) else value


def unknown_variables(
    prefix: str, settings: Collection[str], *, others: Collection[str] = ()
) -> list[str]:
    """A line for each variable under ``prefix`` that is neither a setting nor one of ``others``.

    ``settings`` are names of fields; ``others`` whole names, or beginnings that end in _.
    """
    known = {f"{prefix}{name}".upper() for name in settings}
    exact = {name for name in others if not name.endswith("_")}
    beginnings = tuple(name for name in others if name.endswith("_"))
    lines = []
    for name in sorted(os.environ):
        upper = name.upper()
        if not upper.startswith(prefix) or upper in known or upper in exact:
            continue
        if upper.startswith(beginnings) or _SERVICE_LINKS.fullmatch(upper.removeprefix(prefix)):
            continue
        near = get_close_matches(upper, [*known, *exact], 1)
        lines.append(f"{name}: not a setting" + (f"; did you mean {near[0]}?" if near else ""))
    return lines


def read_environment(kind: type[S], what: str) -> S:
    """Settings from the environment. Raises ``ValueError`` that names each variable which is wrong;
    ``what`` names the settings in that message."""
    prefix = kind.model_config["env_prefix"]
    lines = unknown_variables(prefix, kind.model_fields)
    settings: S | None = None
    try:
        settings = kind()
    except ValidationError as error:
        lines += [
            f"{prefix}{'_'.join(map(str, detail['loc'])).upper()}: {detail['msg']}"
            for detail in error.errors()
        ]
    if lines or settings is None:
        raise ValueError(f"{what} do not fit: " + "; ".join(lines))
    return settings
