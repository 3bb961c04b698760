"""``python -m tools.settings_page``: prints docs/settings.md, the page of every setting."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from clips.render.settings import RenderSettings
from orchestrator.settings import sections, whole_settings
from worker.environment import section_of
from worker.settings import WorkerSettings

_PAGE = """\
# Settings

Every setting of the orchestrator, of its workers and of the slot model. Written by
`python -m tools.settings_page > docs/settings.md`; a test fails when it is stale.

- **Environment**: `TIDEGATE_` and the name in capitals, two underscores for each dot:
  `queue.max_waiting` is `TIDEGATE_QUEUE__MAX_WAITING`.
- **`tidegate.toml`** (in the working directory, or where `TIDEGATE_CONFIG` says) has a table for
  each section of the orchestrator's: `[queue]` with `max_waiting = 7`. The environment overrides
  it; the command line overrides both.
- **`pool.toml`** ([pool.md](pool.md)): an instance's `settings` are a worker's, without
  `worker.`.

A bad value or an unknown name stops the start and is named. Codes in brackets name the promise that
a setting belongs to. Defaults are in parentheses; of several choices the first is the default.

## The orchestrator

`tidegate reload` and SIGHUP read some of them again ([operating.md](operating.md#settings)).

{orchestrator}

## Workers

Read by each worker when Triton loads the model `llm`. `tidegate up` passes its environment on.

{worker}

## The slot model

Read when Triton loads the model `slot`, which renders clips ([slot.md](slot.md)).

{slot}

## Variables that are not settings

- `TIDEGATE_CONFIG`: path of `tidegate.toml`.
- `TIDEGATE_HOME`: folder for engines, models, journals, logs.
- `TIDEGATE_TRITON`: path of a `tritonserver` to use instead of the downloaded one.
- `TIDEGATE_SHARED_BY`: set by launchers, how many workers share this machine's memory.
- `TIDEGATE_JOURNAL_DEFAULT`: set by launchers, the journal if `journal.path` is unset.
- `TIDEGATE_POOL_MARK`: set by launchers, marks the processes of one so that all can be ended.
- `TIDEGATE_LEGACY_STUB`: set by launchers, whether Triton's stub was built for numpy 1.
- `TIDEGATE_URL`, `TIDEGATE_TOKEN`: service and token of the `tidegate` commands.
"""
_PAGE_NAME: Final = re.compile(r"docs/([a-z-]+\.md)")
_UNITS: Final = {
    "_s": "s",
    "_ms": "ms",
    "_bytes": "bytes",
    "_gib": "GiB",
    "_tokens": "tokens",
    "_per_min": "per minute",
    "_share": "share, 0 to 1",
}


class SettingRow(NamedTuple):
    """One setting: its dotted name, its default with unit or choices, and its meaning."""

    name: str
    default: str
    meaning: str


def page() -> str:
    """The whole page in Markdown."""
    return _PAGE.format(
        orchestrator=_chapter(whole_settings(), ""),
        worker=_chapter(WorkerSettings, "worker."),
        slot=_chapter(RenderSettings, "slot."),
    )


def rows_of(kind: type[BaseModel], above: str = "") -> Iterator[SettingRow]:
    """Every setting of ``kind``, including those of its sections."""
    said = _docstrings(kind)
    for name, field in kind.model_fields.items():
        section = section_of(field.annotation)
        is_always_there = section is field.annotation
        if section is not None and is_always_there:
            yield from rows_of(section, f"{above}{name}.")
        else:
            yield SettingRow(f"{above}{name}", _default(name, field), said.get(name, ""))


def _docstrings(kind: type[BaseModel]) -> dict[str, str]:
    """The docstring of each field, by name; those of base classes too."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, BaseModel) or base in (BaseModel, BaseSettings):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in pairwise(tree.body):
            match field, after:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


def _chapter(kind: type[BaseSettings], above: str) -> str:
    """Lists of settings: first the settings outside sections, then one list per section."""
    tables = {name: section_of(field.annotation) for name, field in kind.model_fields.items()}
    rows = list(rows_of(kind))
    own = [row for row in rows if tables[row.name.partition(".")[0]] is None]
    parts = [_list(own, above)]
    if kind is whole_settings():
        keys = [row._replace(name=f"keys.NAME.{row.name}") for row in rows_of(sections.KeySettings)]
        parts += [f"### keys\n\n{_first_paragraph(sections.KeySettings)}", _list(keys, above)]
    for name, section in tables.items():
        inside = [row for row in rows if row.name.startswith(f"{name}.")]
        if section is not None and inside:
            parts += [f"### {above}{name}\n\n{_first_paragraph(section)}", _list(inside, above)]
    return "\n\n".join(parts)


def _list(rows: list[SettingRow], above: str) -> str:
    return "\n".join(
        f"- `{above}{row.name}` ({row.default}): {_markdown(row.meaning)}" for row in rows
    )


def _first_paragraph(kind: type[BaseModel]) -> str:
    return _markdown(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0])


def _markdown(text: str) -> str:
    text = _PAGE_NAME.sub(r"[\1](\1)", " ".join(text.split()))
    return text.replace("``", "`")


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if choices := _choices(field.annotation):
        rest = [choice for choice in choices if choice != value]
        return ", ".join(f"`{choice}`" for choice in [value, *rest])
    if value is None:
        return "unset"
    if is_dataclass(value):
        value = ", ".join(f"{key}: {each}" for key, each in vars(value).items() if each)
    if value in ("", (), {}):
        return "empty"
    if isinstance(value, bool):
        return f"`{value}`".lower()
    if isinstance(value, tuple):
        return f"`{','.join(map(str, value))}`"
    if isinstance(value, int) and value >= 2**20 and not value % 2**20:
        unit, size = ("GiB", 2**30) if not value % 2**30 else ("MiB", 2**20)
        return f"`{value}`, {value // size} {unit}"
    units = [unit for suffix, unit in _UNITS.items() if name.endswith(suffix)]
    told = f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
    return f"{told} {units[0]}" if units else told


def _choices(annotation: Any) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return list(annotation)
    return list(map(str, get_args(annotation))) if get_origin(annotation) is Literal else []


if __name__ == "__main__":
    sys.stdout.write(page())
