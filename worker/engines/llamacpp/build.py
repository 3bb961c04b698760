"""Builds a llama.cpp engine, ready to start, with its tokenizer and model card, from settings."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from protocol.grammar_source import library_version as grammar_version
from protocol.model_digest import files_digest
from worker.core import Clock
from worker.cpu_kernels import draws as cpu_draws
from worker.engines.llamacpp import vocabulary
from worker.engines.llamacpp.backend import LlamaBackend, LlamaCppLimits
from worker.engines.llamacpp.card import model_card
from worker.engines.llamacpp.gguf_file import GgufFile, find_gguf, parts_of
from worker.engines.llamacpp.library import load_library
from worker.engines.llamacpp.model import Context, LoadedModel
from worker.engines.llamacpp.options import Options, read_options
from worker.engines.llamacpp.sequences import Sequences
from worker.engines.llamacpp.sizes import context_shape, threads_for
from worker.engines.stepped import SteppedConfig, SteppedEngine
from worker.errors import DeviceUnavailable, TokenizerError
from worker.grammar.compiler import build_compiler
from worker.loaded import LoadedEngine
from worker.log import model_log
from worker.models.load_timing import LoadTiming
from worker.sampling.sampler import Sampler
from worker.scheduler.config import MAX_STALL_S
from worker.settings import WorkerSettings, variable
from worker.text import Tokenizer

_MAX_SEQUENCES: Final = 256
"""Most sequences that llama.cpp is built for."""
_PROBES: Final = (
    "The tide waits for no one, said 3 of 1234 men.",
    "  two  blanks\n\n\tand a tab: don't, it's Ünïcödé … 你好 ✓",
)


def build_engine(settings: WorkerSettings, clock: Clock = time.monotonic) -> LoadedEngine:
    """Load the GGUF file that ``settings`` name.

    Raises ``EngineMissing``, ``DeviceUnavailable``, ``CheckpointError``, ``TokenizerError``,
    ``MemoryError``, and ``ValueError`` for settings that do not fit this engine.
    """
    options = read_options(settings.engine_args)
    _check(settings)
    timing = LoadTiming()
    library = load_library()
    on_gpu = settings.device == "cuda"
    if on_gpu and not library.llama_supports_gpu_offload():
        raise DeviceUnavailable(
            "device 'cuda' cannot be used: the wheel of xllamacpp on PyPI computes on the CPU;"
            " install the same version's CUDA wheel from that project's own index, or ask for the"
            " CPU: tidegate up --device cpu, or TIDEGATE_WORKER__DEVICE=cpu"
        )
    path = find_gguf(settings.model_path)
    file = GgufFile(path)
    # On threads that end: OpenMP keeps workers for every thread that has computed.
    with ThreadPoolExecutor(2, "tidegate-build") as threads:
        hashing = threads.submit(_timed_digest, path, timing)
        loading = threads.submit(_load, settings, options, file, on_gpu, timing)
        return _assemble(settings, options, file, loading, hashing, timing, clock)


def _check(settings: WorkerSettings) -> None:
    """Raise ``ValueError`` for settings of our own engine that llama.cpp cannot honour."""
    refused = {
        "deterministic": (settings.deterministic, "its sums depend on what else is in a step"),
        "kv.disk_path": (settings.kv.disk_path is not None, "its KV is kept in memory only"),
        "quantize": (settings.quantize != "none", "the file says how its weights are rounded"),
        "dtype": (settings.dtype != "auto", "the file says of what type its weights are"),
        "attention": (settings.attention != "auto", "it has its own; see flash_attn"),
    }
    for name, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"{variable(name)} is not for the llamacpp engine: {why}")
    if settings.max_running > _MAX_SEQUENCES:
        raise ValueError(
            f"TIDEGATE_WORKER__MAX_RUNNING={settings.max_running}: llama.cpp was built for"
            f" {_MAX_SEQUENCES} sequences at most"
        )


def _timed_digest(path: Path, timing: LoadTiming) -> str:
    with timing.timed("digest"):
        return files_digest(parts_of(path))


def _load(
    settings: WorkerSettings, options: Options, file: GgufFile, on_gpu: bool, timing: LoadTiming
) -> tuple[LoadedModel, Context]:
    with timing.timed("model_load"):
        model = LoadedModel(file.path, options, on_gpu=on_gpu)
    with timing.timed("kv_pool"):
        try:
            shape = context_shape(settings, options, file, model, on_gpu)
            return model, Context(model, shape, options, threads_for(settings, model))
        except BaseException:
            model.close()
            raise


def _assemble(
    settings: WorkerSettings,
    options: Options,
    file: GgufFile,
    loading: "Future[tuple[LoadedModel, Context]]",
    hashing: "Future[str]",
    timing: LoadTiming,
    clock: Clock,
) -> LoadedEngine:
    try:
        with timing.timed("tokenizer"):
            tokenizer_json, stated, template = _tokenizer_files(file, options)
    except BaseException:
        # The weights are being loaded all the same, and nobody else would free them.
        with suppress(Exception):
            loading.result()[1].close()
        raise
    model, context = loading.result()
    try:
        eos = _end_tokens(file, model)
        with timing.timed("tokenizer_ready"):
            tokenizer = _tokenizer(settings, file, tokenizer_json, stated, template, eos)
            _check_vocabulary(file, options, tokenizer, model)
            grammars = build_compiler(tokenizer_json, model.vocab_size, eos)
        sequences = Sequences(
            settings.max_running,
            context.cells,
            unified=options.kv_unified is not False,
            reuse=settings.kv.prefix_cache and model.keeps_prefixes,
        )
        context_tokens = min(model.trained_context, sequences.longest, context.sequence_cells)
        _prepare_sampling()
        sampler = Sampler(
            eos,
            torch.device("cpu"),
            slots=settings.max_running,
            vocab_size=model.vocab_size,
            max_tokens=context_tokens,
        )
        limits = LlamaCppLimits(settings.kv.block_tokens, settings.max_step_tokens, MAX_STALL_S)
        card = model_card(
            settings,
            options,
            file,
            model,
            tokenizer,
            eos,
            context_tokens,
            hashing.result(),
            grammar_version() if grammars is not None else "",
        )
    except BaseException:
        context.close()
        raise
    backend = LlamaBackend(context, sequences, sampler, limits, clock)
    engine = SteppedEngine(backend, SteppedConfig.of(card, frees_at_once=True), clock=clock)
    total_ms = timing.total_ms()
    model_log.info(
        "%s is ready on %s after %.2f s: %s, %s, %d KV cells for %d texts, context %d;"
        " ms by phase: %s",
        card.model,
        card.device,
        total_ms / 1e3,
        card.engine_version,
        model.description,
        context.cells,
        settings.max_running,
        context_tokens,
        timing,
    )
    return LoadedEngine(engine, tokenizer, card, timing.ms | {"total": total_ms}, grammars)


def _prepare_sampling() -> None:
    """Compile the sampling loops while the worker loads, so that no request waits for that."""
    from worker.cpu_kernels.compiled import compiler_problem, give_up

    # llama.cpp's threads are at rest while tokens are drawn, but spin for a while.
    torch.set_num_threads(1)
    if compiler_problem() is None:
        try:
            cpu_draws.compile_draws()
        except Exception as error:  # whatever a compiler raises
            give_up(f"{type(error).__name__}: {error}")


def _tokenizer_files(file: GgufFile, options: Options) -> tuple[bytes, dict[str, Any], str]:
    """``tokenizer.json``, what ``tokenizer_config.json`` would say, the chat template."""
    stated, template = vocabulary.token_settings(file), vocabulary.chat_template(file)
    folder = options.tokenizer
    if folder is None:
        return vocabulary.build_tokenizer(file), stated, template
    original = Tokenizer.from_directory(folder)
    return original.json, stated | original.special_tokens, template or original.chat_template


def _tokenizer(
    settings: WorkerSettings,
    file: GgufFile,
    tokenizer_json: bytes,
    stated: dict[str, Any],
    template: str,
    eos: tuple[int, ...],
) -> Tokenizer:
    try:
        return Tokenizer(
            tokenizer_json,
            stated,
            template,
            eos,
            special_in_prompts=settings.plain.special_tokens,
        )
    except Exception as error:  # whatever is in a file that somebody made
        raise TokenizerError(
            f"{file.path}: the tokenizer in it cannot be read ({error}); name a folder with the"
            " original one: TIDEGATE_WORKER__ENGINE_ARGS='tokenizer=FOLDER'"
        ) from error


def _end_tokens(file: GgufFile, model: LoadedModel) -> tuple[int, ...]:
    """Ids of all tokens that end an answer: the file's, and those that llama.cpp knows by name."""
    by_name = [token for token in vocabulary.control_ids(file) if model.ends_text(token)]
    found = dict.fromkeys([*vocabulary.end_ids(file), *by_name])
    ends = tuple(token for token in found if 0 <= token < model.vocab_size)
    if not ends:
        model_log.warning("%s names no end token: answers end at max_tokens only", file.path)
    return ends


def _check_vocabulary(
    file: GgufFile, options: Options, tokenizer: Tokenizer, model: LoadedModel
) -> None:
    """Raise ``TokenizerError`` for ids that the model does not have; warn where a tokenizer that
    was built here splits text differently from llama.cpp."""
    largest = tokenizer.largest_id
    if largest >= model.vocab_size:
        raise TokenizerError(
            f"{options.tokenizer or file.path}: the tokenizer has ids up to {largest}, the model"
            f" {model.vocab_size} tokens; it is another model's"
        )
    if options.tokenizer is not None or file.text(vocabulary.ORIGINAL):
        return
    for probe in _PROBES:
        if tokenizer.encode(probe, add_special_tokens=False) != model.tokenize(probe):
            model_log.warning(
                "%s: prompts may be cut into other tokens here than by llama.cpp (%r is); the"
                " model's original tokenizer is better: TIDEGATE_WORKER__ENGINE_ARGS="
                "'tokenizer=FOLDER'",
                file.path,
                probe,
            )
            return
