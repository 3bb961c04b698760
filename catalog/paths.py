"""Paths of the serving code, the files that come with it, and this machine's state.

Standard library only.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder with ``orchestrator``, ``worker`` and ``model_repository``: the checkout, or
``tidegate/_runtime`` of an installed wheel."""
MODEL_REPOSITORY = ROOT / "model_repository"
DEMO_CHECKPOINT = ROOT / "worker" / "demo_model" / "checkpoint"
NGC_ROOT = Path("/opt/tritonserver")
"""The folder of Triton in NVIDIA's container images."""
JOURNAL_BY_DEFAULT = "TIDEGATE_JOURNAL_DEFAULT"
"""Variable in which a launcher passes the orchestrator's journal; any setting overrides it."""


def state_dir() -> Path:
    """Folder of the wheel's server and the logs: ``TIDEGATE_HOME``, or ``.tidegate`` in a checkout.

    An installed wheel keeps them in ``$XDG_DATA_HOME/tidegate``, ``~/.local/share`` by default: its
    own folder is replaced by the next ``pip install`` and may belong to another user.
    """
    if home := os.environ.get("TIDEGATE_HOME"):
        return Path(home).resolve()
    if (ROOT / "pyproject.toml").is_file():
        return ROOT / ".tidegate"
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data).resolve() / "tidegate"


def log_dir(home: Path, host: str, port: int) -> Path:
    """Folder for logs of the service at that address."""
    return home / "logs" / _place(host, port)


def journal_file(home: Path, host: str, port: int) -> Path:
    """Default file in which the orchestrator at that address records durable tasks."""
    return home / "journal" / f"{_place(host, port)}.db"


def _place(host: str, port: int) -> str:
    return f"{re.sub(r'[^A-Za-z0-9.-]', '_', host)}-{port}"
