"""Makes a loaded engine's model card, with the digest of everything that affects tokens (PF-6)."""

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec

from protocol import ModelCard, SamplingDefaults
from protocol.sampling import defaults_of
from worker.log import model_log
from worker.models.config import read_generation_config
from worker.models.folder import model_name
from worker.runner.base import BuiltRunner
from worker.scheduler.config import MAX_WAITING
from worker.settings import BLOCK_TOKENS, WorkerSettings
from worker.text import Tokenizer


def device_facts(device: str, count: int = 1) -> dict[str, Any]:
    """The fields of ``ModelCard`` about the process's current GPU for ``cuda…``, and about the next
    GPUs if ``count`` are used together; none for any other device."""
    if not device.startswith("cuda"):
        return {}
    import torch  # some engines without a GPU do not need it

    if not torch.cuda.is_available():
        return {}
    first = torch.cuda.current_device()
    used = range(first, first + count)
    major, minor = min(torch.cuda.get_device_capability(index) for index in used)
    masks = [mask_of(index, os.environ.get("CUDA_VISIBLE_DEVICES")) for index in used]
    return {
        "vram_bytes": sum(torch.cuda.get_device_properties(index).total_memory for index in used),
        "compute_capability": f"{major}.{minor}",
        "device_mask": sum(masks) if all(masks) else 0,
    }


def mask_of(index: int, visible: str | None) -> int:
    """The bit of the GPU with number ``index`` in ``CUDA_VISIBLE_DEVICES`` (``visible``).

    0 if that variable names the GPU by UUID: its number on the host is unknown then.
    """
    if visible is None:
        return 1 << index
    names = [name.strip() for name in visible.split(",")]
    named = names[index] if index < len(names) else ""
    return 1 << int(named) if named.isascii() and named.isdigit() and int(named) < 64 else 0


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
"""Parts of the worker whose code affects the tokens."""


def engine_digest(settings: WorkerSettings, built: BuiltRunner) -> str:
    """Hex SHA-256 of ``RESULT_CODE`` and of the settings and versions that affect the tokens."""
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
        "attention": built.attention,
        "arithmetic": built.arithmetic,
        "block_tokens": BLOCK_TOKENS,
        "deterministic": settings.deterministic,
        "max_step_tokens": settings.max_step_tokens,
        "max_running": settings.max_running,
        "team_steps": settings.team_steps,
    }
    digest.update(repr(sorted(facts.items())).encode())
    return digest.hexdigest()


def version_of(package: str) -> str:
    """Version of an installed package; ``unknown`` in a checkout that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def end_tokens(
    found: tuple[int, ...], tokenizer: Tokenizer, vocab_size: int, path: Path
) -> tuple[int, ...]:
    """Ids of all tokens that end an answer: the ids ``found`` with the model and the tokenizer's
    own end token (a chat model's end of turn)."""
    own = tokenizer.eos_token_id
    if own is not None and own not in found:
        if own < vocab_size:
            found = (*found, own)
        else:
            model_log.warning(
                "%s: the tokenizer's eos_token has id %d, outside the model's vocabulary of %d"
                " tokens, and can never come",
                path,
                own,
                vocab_size,
            )
    if not found:
        model_log.warning("%s names no end token: answers end at max_tokens only", path)
    return found


def model_card(
    settings: WorkerSettings,
    tokenizer: Tokenizer,
    *,
    device: str,
    model_digest: str,
    gpus: int = 1,
    **own: Any,
) -> ModelCard:
    """Make the card of an engine on ``gpus`` GPUs, or none. ``own`` has the fields that only the
    engine knows or knows better. ``model_digest`` is in hex."""
    common = {
        "model": settings.model_name or model_name(settings.model_path),
        "tokenizer_json": tokenizer.json,
        "chat_template": tokenizer.chat_template,
        "special_tokens": tokenizer.special_tokens,
        "bos_token_id": tokenizer.bos_token_id,
        "hash_salt": bytes.fromhex(model_digest),
        "model_digest": model_digest,
        "engine": settings.engine,
        "engine_version": version_of("tidegate"),
        "device": device,
        "max_running": settings.max_running,
        "max_waiting": MAX_WAITING,
        "min_start_budget_ms": settings.min_start_budget_ms,
        "sampling_defaults": read_sampling_defaults(settings.model_path),
        "deterministic": settings.deterministic,
    }
    return ModelCard(**(common | device_facts(device, gpus) | own))


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    """Read the sampling defaults of checkpoint directory ``path``. They are logged, because they
    change what clients get. Values out of range are skipped with a warning.

    Raises ``BrokenCheckpoint`` for a file that cannot be read.
    """
    found = defaults_of(read_generation_config(path))
    for unfit in found.unfit:
        model_log.warning(
            "%s: %s is out of range and not used", path / "generation_config.json", unfit
        )
    if found.defaults != SamplingDefaults():
        model_log.info(
            "where requests do not say, sampling is that of generation_config.json (%s)",
            ", ".join(
                f"{key} {value}" for key, value in msgspec.to_builtins(found.defaults).items()
            ),
        )
    return found.defaults
