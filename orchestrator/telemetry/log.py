"""Named loggers and the formats of their records: JSON lines, or readable lines on a terminal.

Fields are passed in ``extra=fields(...)``. Prompts, generated text and secrets are never fields.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Literal

import msgspec

service_log = logging.getLogger("orchestrator.service")
lane_log = logging.getLogger("orchestrator.lane")
access_log = logging.getLogger("orchestrator.access")

Field = str | int | float | bool | None
LogFormat = Literal["auto", "json", "text"]


def fields(**values: Field) -> Mapping[str, object]:
    return {"fields": values}


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    _encoder = msgspec.json.Encoder(enc_hook=str)
    _second = 0
    _stamp = ""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:  # most lines have the same second as others
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second
        entry: dict[str, object] = {
            "time": f"{self._stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        try:
            return self._encoder.encode(entry).decode()
        except (ValueError, OverflowError):  # half a surrogate pair, an infinite number
            return json.dumps(entry, default=str)


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
    """Send every logger of the process to stderr. ``auto``: text on a terminal, else JSON."""
    # Lines have no thread, process or code position: looking these up takes as long as writing
    # the line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    readable = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter() if readable else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
