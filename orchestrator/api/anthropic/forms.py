"""The output format of Anthropic's bodies: ``output_config.format``, or ``output_format`` of its
beta."""

import msgspec

from orchestrator.api.http.decode import Reader, decode_part
from orchestrator.api.http.fields import NULL, StatedGrammar, Unused
from orchestrator.api.http.grammars import json_schema
from orchestrator.api.http.tools import require_bounds
from orchestrator.errors import InvalidRequest


class FormatBody(msgspec.Struct, frozen=True):
    """A JSON Schema for the answer; its text goes to the worker as it came."""

    type: str
    schema: msgspec.Raw = NULL
    name: Unused = NULL


class OutputConfig(msgspec.Struct, frozen=True):
    """Output settings. The effort to make is a hint that nothing here depends on."""

    format: msgspec.Raw = NULL
    effort: Unused = NULL
    task_budget: Unused = NULL


_config_reader: Reader[OutputConfig | None] = Reader(OutputConfig | None)
_format_reader: Reader[FormatBody | None] = Reader(FormatBody | None)


def stated_form(output_config: msgspec.Raw, output_format: msgspec.Raw) -> StatedGrammar | None:
    """The grammar that the answer must match, if one is stated. Raises ``InvalidRequest``."""
    require_bounds(output_config, "output_config")
    config: OutputConfig | None = decode_part(output_config, _config_reader, "output_config")
    field, stated = "output_config.format", NULL if config is None else config.format
    if stated == NULL:
        field, stated = "output_format", output_format
    require_bounds(stated, field)
    form: FormatBody | None = decode_part(stated, _format_reader, field)
    if form is None:
        return None
    if form.type != "json_schema":
        raise InvalidRequest(
            f"{field}: type {form.type[:32]!r} is not supported; expected json_schema", field=field
        )
    if form.schema == NULL:
        raise InvalidRequest(f"{field}: json_schema needs schema", field=field)
    return StatedGrammar(field, json_schema(field, form.schema, None))
