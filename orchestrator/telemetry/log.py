"""Named loggers, and how their records look: JSON lines, or one readable line on a terminal.

Fields travel in ``extra=fields(...)``. Prompts, generated text and secrets are never fields.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Literal

service_log = logging.getLogger("orchestrator.service")
lane_log = logging.getLogger("orchestrator.lane")
access_log = logging.getLogger("orchestrator.access")

Field = str | int | float | bool | None
LogFormat = Literal["auto", "json", "text"]


def fields(**values: Field) -> Mapping[str, object]:
    """``extra`` of a logging call: structured fields beside the message."""
    return {"fields": values}


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """``12:00:01 info  access  task ended outcome=met …``"""

    def format(self, record: logging.LogRecord) -> str:
        values: Mapping[str, Field] = getattr(record, "fields", {})
        parts = [
            time.strftime("%H:%M:%S", time.localtime(record.created)),
            f"{record.levelname.lower():7}",
            f"{record.name.rpartition('.')[2]:7}",
            record.getMessage(),
            *(f"{name}={value}" for name, value in values.items() if value is not None),
        ]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(log_format: LogFormat, level: str) -> None:
    """Send every logger of the process to stderr. ``auto`` is readable on a terminal only."""
    readable = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter() if readable else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
