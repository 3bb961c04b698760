"""Makes the model card of a vLLM engine."""

import hashlib
from pathlib import Path
from typing import Any, Final

from protocol import Adapter, Feature, ModelCard, Vision
from worker.engine.card import sampling_defaults
from worker.engine.device_facts import device_facts
from worker.engine.digest import version_of
from worker.engines.vllm.library import library_version
from worker.log import model_log
from worker.models.config import read_generation_config
from worker.models.folder import model_name
from worker.scheduler.config import MAX_WAITING
from worker.settings import WorkerSettings
from worker.text import Tokenizer

_LACKS: Final = (Feature.EMBEDDINGS, Feature.SESSIONS)


def end_tokens(path: Path, stated: object, vocab_size: int) -> tuple[int, ...]:
    """Ids of the tokens that end an answer, by ``generation_config.json`` or else ``config.json``
    (``stated``). ``with_own_end`` adds the tokenizer's."""
    found = read_generation_config(path).get("eos_token_id")
    if found is None:
        found = stated
    listed = found if isinstance(found, list | tuple) else [found]
    return tuple(one for one in listed if isinstance(one, int) and 0 <= one < vocab_size)


def with_own_end(found: tuple[int, ...], tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """``found`` and the tokenizer's own end token, a chat model's end of turn."""
    own = tokenizer.eos_token_id
    if own is not None and own not in found and own < vocab_size:
        found = (*found, own)
    if not found:
        model_log.warning("the model names no end token: answers end at max_tokens only")
    return found


def lacking(*, grammars: bool, kv_events: bool, speculates: bool) -> tuple[Feature, ...]:
    """Features that the engine lacks, for its card."""
    lacks = [*_LACKS]
    if not grammars:
        lacks.append(Feature.GRAMMAR)
    if not kv_events:
        lacks.append(Feature.KV_EVENTS)
    if speculates:  # vLLM refuses them where it guesses tokens ahead
        lacks += [Feature.LOGIT_BIAS, Feature.MIN_P]
    return tuple(sorted(lacks))


def model_card(
    settings: WorkerSettings,
    config: Any,
    tokenizer: Tokenizer,
    eos: tuple[int, ...],
    *,
    model_digest: str,
    block_tokens: int,
    own_context_tokens: int,
    grammars: str,
    lacks: tuple[Feature, ...],
    can_pause: bool,
    can_continue: bool,
    abort_ms: float,
    adapters: tuple[Adapter, ...],
    vision: Vision | None,
) -> ModelCard:
    """Make the card. ``config`` is vLLM's, as changed when the model was loaded."""
    model = config.model_config
    gpus = config.parallel_config.world_size
    device = settings.device if settings.device == "cpu" else f"cuda:{_numbers(gpus)}"
    facts = device_facts(device, gpus)
    quantization = model.quantization
    return ModelCard(
        model=settings.model_name or model_name(settings.model_path),
        context_tokens=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        tokenizer_json=tokenizer.json,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=eos,
        block_tokens=block_tokens,
        hash_salt=bytes.fromhex(model_digest),
        engine=settings.engine,
        engine_version=f"{version_of('tidegate')}, {library_version()}",
        engine_digest=engine_digest(settings, model),
        model_digest=model_digest,
        device=device,
        max_running=max_running(settings, config),
        max_waiting=MAX_WAITING,
        min_start_budget_ms=settings.min_start_budget_ms,
        max_step_tokens=config.scheduler_config.max_num_batched_tokens,
        can_pause=can_pause,
        full_context_tokens=max(own_context_tokens, model.max_model_len),
        sampling_defaults=sampling_defaults(settings),
        grammars=grammars,
        can_continue=can_continue,
        lacks=lacks,
        abort_ms=abort_ms,
        quantization="none" if quantization is None else str(quantization),
        vram_bytes=facts.vram_bytes,
        compute_capability=facts.compute_capability,
        device_mask=facts.device_mask,
        deterministic=settings.deterministic,
        tensor_parallel=config.parallel_config.tensor_parallel_size,
        adapters=adapters,
        vision=vision,
    )


def _numbers(count: int) -> str:
    """The first ``count`` GPUs that this process sees, such as ``0,1``."""
    return ",".join(map(str, range(count)))


def max_running(settings: WorkerSettings, config: Any) -> int:
    """Most jobs that run at once: the lesser of the worker's number and the one given to vLLM."""
    return min(settings.max_running, int(config.scheduler_config.max_num_seqs))


def engine_digest(settings: WorkerSettings, model: Any) -> str:
    """Hex SHA-256 over the code, versions and settings that decide which tokens come out."""
    stated = sorted(settings.engine_args.items())
    sums = settings.deterministic, settings.tensor_parallel
    facts = (library_version(), version_of("torch"), str(model.dtype), stated, sums)
    digest = hashlib.sha256(repr(facts).encode())
    for code in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(code.name.encode() + b"\0" + code.read_bytes())
    return digest.hexdigest()
