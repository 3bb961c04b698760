"""Builds an engine over ``transformers``, ready to start, from settings."""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import torch

from protocol import Feature
from protocol.grammar_source import library_version
from protocol.model_digest import model_digest
from worker.core import Clock
from worker.cpu_kernels import draws as cpu_draws
from worker.cpu_kernels.compiled import compiler_problem, give_up
from worker.engine.card import end_tokens, model_card
from worker.engine.digest import version_of
from worker.engines.stepped import SteppedConfig, SteppedEngine
from worker.engines.transformers.backend import BackendLimits, TransformersBackend
from worker.engines.transformers.batches import PaddedBatch, SeparateTexts, Texts
from worker.engines.transformers.checkpoint import Facts, load_model, read_facts
from worker.engines.transformers.decoder import LibraryDecoder, cache_bytes
from worker.engines.transformers.images import open_images
from worker.grammar.compiler import build_compiler
from worker.loaded import LoadedEngine
from worker.log import model_log
from worker.models.load_timing import LoadTiming
from worker.runner.device import open_device
from worker.runner.memory import CudaMemory, ProcessMemory, cpu_pool_bytes
from worker.runner.precision import SMALL_BYTES, has_bfloat16, use_threads
from worker.sampling.sampler import Sampler
from worker.settings import WorkerSettings
from worker.text import Tokenizer

LACKS: Final = (
    Feature.EMBEDDINGS,
    Feature.KV_EVENTS,
    Feature.PROMPT_LOGPROBS,
    Feature.SESSIONS,
)
_CUDA_POOL_SHARE: Final = 0.6
"""Share of GPU memory free after loading that caches may take: each step copies them once."""
_TOLERANCE: Final = 0.05
"""Largest change of a logit that padding may cause, relative to the range of the logits."""


def build_engine(settings: WorkerSettings, clock: Clock = time.monotonic) -> LoadedEngine:
    """Load what ``settings`` name.

    Raises ``EngineMissing``, ``DeviceUnavailable``, ``CheckpointError``, ``TokenizerError``.
    """
    # On a thread that ends: OpenMP keeps workers for every thread that has computed.
    with ThreadPoolExecutor(1, "tidegate-build") as threads:
        return threads.submit(_build, settings, clock).result()


def _build(settings: WorkerSettings, clock: Clock) -> LoadedEngine:
    timing = LoadTiming()
    facts = read_facts(settings)
    with timing.timed("tokenizer"):
        tokenizer = Tokenizer.from_directory(
            settings.model_path,
            facts.eos_token_ids,
            special_in_prompts=settings.plain.special_tokens,
        )
    eos = end_tokens(settings.model_path, facts, tokenizer)
    with timing.timed("digest"):
        digest = model_digest(settings.model_path)
    with timing.timed("cuda_init" if settings.device == "cuda" else "cpu_init"):
        device = open_device(settings.device)
    with timing.timed("model_load"):
        model = load_model(settings, facts, device, _dtype(settings, device))
        weights = sum(each.nbytes for each in model.parameters())
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        if device.type == "cpu":
            _set_up_cpu(settings, weights)
    decoder = LibraryDecoder(model, device)
    with timing.timed("warm_up"):
        is_batched, token_bytes = _try_out(decoder, facts)
        images = open_images(settings, decoder, tokenizer)
    pool_tokens = _pool_tokens(settings, facts, device, token_bytes)
    context = min(facts.context_tokens, pool_tokens)
    sampler = Sampler(
        eos,
        device,
        slots=settings.max_running,
        vocab_size=facts.vocab_size,
        max_tokens=context,
    )
    texts: Texts = PaddedBatch(decoder) if is_batched else SeparateTexts(decoder)
    limits = BackendLimits(
        settings.max_running,
        pool_tokens,
        settings.kv.block_tokens,
        settings.max_step_tokens if is_batched else 0,
    )
    grammars = build_compiler(tokenizer.json, facts.vocab_size, eos)
    lacks = LACKS if grammars is not None else tuple(sorted((*LACKS, Feature.GRAMMAR)))
    card = msgspec.structs.replace(
        model_card(
            settings,
            facts,
            tokenizer,
            eos,
            context_tokens=context,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            digests=(digest, _digest(settings, dtype, is_batched)),
            grammars="" if grammars is None else library_version(),
        ),
        can_pause=False,
        lacks=lacks,
        vision=None if images is None else images.vision,
    )
    engine = SteppedEngine(
        TransformersBackend(decoder, texts, sampler, limits, images=images),
        SteppedConfig.of(card, frees_at_once=True),
        clock=clock,
    )
    total_ms = timing.total_ms()
    model_log.info(
        "%s is ready on %s after %.2f s: %s by transformers %s, the last resort and slower than our"
        " own engine: %s, %s; %d tokens of keys and values, context %d; ms by phase: %s",
        card.model,
        card.device,
        total_ms / 1e3,
        facts.architecture,
        version_of("transformers"),
        "one batch of all texts" if is_batched else "one text after the other, prompts in one step",
        "text only" if images is None else "text and images",
        pool_tokens,
        context,
        timing,
    )
    return LoadedEngine(engine, tokenizer, card, timing.ms | {"total": total_ms}, grammars)


def _dtype(settings: WorkerSettings, device: torch.device) -> torch.dtype | str:
    """Type of the weights: the one asked for; ``auto`` is the checkpoint's where that is fast."""
    if settings.dtype != "auto":
        found = getattr(torch, settings.dtype)
        assert isinstance(found, torch.dtype)
        return found
    return "auto" if device.type == "cuda" or has_bfloat16() else torch.float32


def _set_up_cpu(settings: WorkerSettings, weight_bytes: int) -> None:
    use_threads(settings, small=weight_bytes < SMALL_BYTES)
    if compiler_problem() is None:
        try:
            cpu_draws.compile_draws()
        except Exception as error:  # whatever a compiler raises
            give_up(f"{type(error).__name__}: {error}")


def _try_out(decoder: LibraryDecoder, facts: Facts) -> tuple[bool, int]:
    """Try whether texts in one batch, read in chunks, get the logits that they get alone; returns
    that, and the bytes that a token's keys and values take."""
    short, long = [3, 5, 7], [4, 6, 8, 9, 5, 4, 3]
    alone, sizes = [], []
    for ids in (short, long):
        texts = SeparateTexts(decoder)
        sizes.append(_read(decoder, texts, ids, facts, len(ids)))
        alone.append(texts.step([2]))
    token_bytes = max(1, (sizes[1] - sizes[0]) // (len(long) - len(short)))
    if not decoder.can_batch:
        return False, token_bytes
    batch = PaddedBatch(decoder)
    expected = torch.cat(alone)
    try:
        for ids in (short, long):
            _read(decoder, batch, ids, facts, 4)
        got = batch.step([2, 2])
    except Exception as error:
        model_log.info("texts cannot be padded (%s)", error)
        return False, token_bytes
    reach = float(expected.amax() - expected.amin())
    off = float((got - expected).abs().amax())
    if not off <= _TOLERANCE * reach:
        model_log.info("texts cannot be padded: logits of %.3g are off by %.3g", reach, off)
        return False, token_bytes
    return True, token_bytes


def _read(decoder: LibraryDecoder, texts: Texts, ids: list[int], facts: Facts, chunk: int) -> int:
    """Read a prompt, ``chunk`` tokens at a time; returns the bytes of its cache."""
    tokens = torch.tensor([ids], device=decoder.device) % facts.vocab_size
    positions = torch.arange(len(ids), device=decoder.device)[None]
    cache = decoder.new_cache()
    for part, places in zip(
        torch.split(tokens, chunk, 1), torch.split(positions, chunk, 1), strict=True
    ):
        _, cache = decoder.run(part, cache, places)
    size = cache_bytes(cache)
    texts.join(len(texts.handles), cache, len(ids))
    return size


def _pool_tokens(
    settings: WorkerSettings, facts: Facts, device: torch.device, token_bytes: int
) -> int:
    """Tokens that all texts together may hold; at least one block."""
    if settings.kv.blocks:
        return settings.kv.blocks * settings.kv.block_tokens
    if device.type == "cuda":
        share = int(CudaMemory(device.index).free_bytes() * _CUDA_POOL_SHARE)
    else:
        context_bytes = facts.context_tokens * token_bytes
        free = ProcessMemory().free_bytes()
        share = cpu_pool_bytes(free, settings.instances, context_bytes)
    wanted = settings.max_running * facts.context_tokens
    return max(settings.kv.block_tokens, min(wanted, share // token_bytes))


def _digest(settings: WorkerSettings, dtype: str, is_batched: bool) -> str:
    """Hex SHA-256 over the code, settings and versions that decide which tokens come out."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    versions = version_of("transformers"), version_of("torch")
    facts = versions, dtype, settings.device, is_batched, settings.max_step_tokens
    digest.update(repr(facts).encode())
    return digest.hexdigest()
