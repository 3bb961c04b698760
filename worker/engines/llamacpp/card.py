"""Makes the model card of a llama.cpp engine."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from protocol import Feature, ModelCard, SamplingDefaults
from protocol.generation_defaults import defaults_of
from worker.engine.digest import version_of
from worker.engines.llamacpp.gguf_file import GgufFile
from worker.engines.llamacpp.library import library_version
from worker.engines.llamacpp.model import LoadedModel
from worker.engines.llamacpp.options import Options
from worker.log import model_log
from worker.models.folder import model_name
from worker.scheduler.config import MAX_WAITING
from worker.settings import WorkerSettings
from worker.text import Tokenizer

_LACKS: Final = (
    Feature.EMBEDDINGS,
    Feature.KV_EVENTS,
    Feature.PROMPT_LOGPROBS,
    Feature.SESSIONS,
)
_SAMPLING_KEYS: Final = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def model_card(
    settings: WorkerSettings,
    options: Options,
    file: GgufFile,
    model: LoadedModel,
    tokenizer: Tokenizer,
    eos: tuple[int, ...],
    context_tokens: int,
    model_digest: str,
    grammars: str,
) -> ModelCard:
    """Make the card. ``context_tokens`` is the model's context as far as the KV cells allow;
    ``grammars`` names the library that enforces grammars, "" if none does."""
    lacks = [*_LACKS, *([] if grammars else [Feature.GRAMMAR])]
    device = "cpu" if settings.device == "cpu" else _device_name()
    return ModelCard(
        model=settings.model_name or model_name(settings.model_path),
        context_tokens=context_tokens,
        vocab_size=model.vocab_size,
        tokenizer_json=tokenizer.json,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=eos,
        block_tokens=settings.kv.block_tokens,
        hash_salt=bytes.fromhex(model_digest),
        engine=settings.engine,
        engine_version=f"{version_of('tidegate')}, {library_version()}",
        engine_digest=_engine_digest(settings, options),
        model_digest=model_digest,
        device=device,
        max_running=settings.max_running,
        max_waiting=MAX_WAITING,
        min_start_budget_ms=settings.min_start_budget_ms,
        max_step_tokens=settings.max_step_tokens,
        can_pause=False,
        full_context_tokens=model.trained_context,
        sampling_defaults=_sampling_defaults(settings, file),
        grammars=grammars,
        can_continue=True,
        lacks=tuple(sorted(lacks)),
        quantization=quantization(model.description),
    )


def _device_name() -> str:
    """Name of the GPU that llama.cpp computes on; ``gpu`` where torch does not see it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "gpu"


def quantization(description: str) -> str:
    """``q4_k_m`` for llama.cpp's ``llama 8B Q4_K - Medium``; ``none`` for unquantised weights."""
    words = description.split(" ", 2)
    kind = words[-1].removeprefix("(guessed) ").lower()
    name, _, size = kind.partition(" - ")
    name = name.replace("all ", "").replace("mostly ", "").strip()
    if name in ("f32", "f16", "bf16"):
        return "none"
    return f"{name}_{size[0]}" if size else name


def _engine_digest(settings: WorkerSettings, options: Options) -> str:
    """Hex SHA-256 over the code, settings and versions that decide which tokens come out."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for part in ("engines", "sampling", "grammar"):
        for code in sorted((root / part).rglob("*.py")):
            digest.update(code.relative_to(root).as_posix().encode() + b"\0" + code.read_bytes())
    facts: Sequence[object] = (
        library_version(),
        version_of("torch"),
        settings.device,
        settings.max_step_tokens,
        settings.max_running,
        options,
    )
    digest.update(repr(facts).encode())
    return digest.hexdigest()


def _sampling_defaults(settings: WorkerSettings, file: GgufFile) -> SamplingDefaults:
    """The sampling that the model's author recommends, where the file states it."""
    if settings.generation_config == "none":
        return SamplingDefaults()
    stated = {
        name: file.values.get(f"general.sampling.{key}") for name, key in _SAMPLING_KEYS.items()
    }
    found = defaults_of(stated)
    for unfit in found.unfit:
        model_log.warning("%s: %s is out of range and not used", file.path, unfit)
    return found.defaults
