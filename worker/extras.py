"""Commands that install optional packages by name: ``pip`` cannot look up Tidegate's extras,
because Tidegate is in no package index, and a checkout's path differs from a wheel's.

Standard library only, because it is imported when packages are missing.
"""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("numba>=0.61",),
    "flashinfer": ("flashinfer-python==0.7.2.post1",),
    "gpu": ("nvidia-ml-py>=12",),
    "otel": ("opentelemetry-exporter-otlp-proto-http>=1.30", "opentelemetry-sdk>=1.30"),
    "slot": ("av>=14", "espeakng-loader>=0.2"),
    "slot-clip": ("transformers>=5",),
    "slot-flux": (
        "accelerate>=1.10",
        "bitsandbytes>=0.48",
        "diffusers>=0.38",
        "transformers>=5",
    ),
    "slot-kokoro": ("kokoro>=0.9.4",),
}
"""Packages by extra, as in ``pyproject.toml``."""


def pip_install(extra: str) -> str:
    """The command that installs ``extra`` into the current environment."""
    named = " ".join(f"'{package}'" for package in PACKAGES[extra])
    path = sys.executable or ""
    # Triton's stub cannot run as an interpreter.
    python = shlex.quote(path) if Path(path).name.startswith("python") else "python"
    return f"{python} -m pip install {named}"
