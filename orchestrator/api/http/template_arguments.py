"""Arguments of a body for its model's chat template: vLLM's ``chat_template_kwargs``."""

import re
from collections.abc import Mapping

import msgspec

from orchestrator.api.http.fields import NULL
from orchestrator.errors import InvalidRequest
from orchestrator.tasks.job import TemplateArgument

_MAX_ARGUMENT_BYTES = 4096
_arguments_decoder = msgspec.json.Decoder(dict[str, bool | int | float | str | None] | None)
_WORD = re.compile(r"[A-Za-z0-9 _.,:+-]{0,64}")
"""Strings that a template may be given: no special token is spelled like this."""


def template_arguments(stated: msgspec.Raw) -> Mapping[str, TemplateArgument]:
    """The arguments that a body states. Raises ``InvalidRequest``."""
    if stated is NULL:
        return {}
    field = "chat_template_kwargs"
    if len(memoryview(stated)) > _MAX_ARGUMENT_BYTES:
        raise InvalidRequest(f"{field} must have at most {_MAX_ARGUMENT_BYTES} bytes", field=field)
    unfit = InvalidRequest(
        f"{field} must be an object of true, false, numbers or words of up to 64 characters, "
        'such as {"enable_thinking": false}',
        field=field,
    )
    try:
        arguments = _arguments_decoder.decode(stated) or {}
    except msgspec.DecodeError:
        raise unfit from None
    if any(isinstance(value, str) and not _WORD.fullmatch(value) for value in arguments.values()):
        raise unfit
    return arguments
