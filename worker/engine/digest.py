"""Hashes of what decides which tokens come out, so that results can be compared (PF-6)."""

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from worker.runner.base import BuiltRunner
from worker.settings import BLOCK_TOKENS, WorkerSettings

RESULT_CODE: Final = (
    "engine",
    "scheduler",
    "runner",
    "sampling",
    "grammar",
    "models",
    "attention",
    "cpu_kernels",
    "core.py",
)
"""Parts of the worker whose code has a say in which tokens come out."""


def engine_digest(settings: WorkerSettings, built: BuiltRunner) -> str:
    """Hex SHA-256 over ``RESULT_CODE``, and the settings and versions that have a say too."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for part in RESULT_CODE:
        for file in sorted((root / part).rglob("*.py")) or [root / part]:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    facts = {
        "torch": version_of("torch"),
        "triton": version_of("triton"),
        "engine": settings.engine,
        "device": built.device,
        "dtype": built.dtype,
        "quantize": settings.quantize,
        "attention": built.attention,
        "arithmetic": built.arithmetic,
        "block_tokens": BLOCK_TOKENS,
        "deterministic": settings.deterministic,
        "max_step_tokens": settings.max_step_tokens,
        "max_running": settings.max_running,
    }
    digest.update(repr(sorted(facts.items())).encode())
    return digest.hexdigest()


def version_of(package: str) -> str:
    """Version of an installed package; ``unknown`` in a checkout that was not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
