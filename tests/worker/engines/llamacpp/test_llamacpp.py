"""Real llama.cpp on the demo checkpoint and on tiny random ones."""

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import DEMO, LLAMA3_ROPE, ROPE, YARN, edit_config, make_checkpoint
from tests.support.lazy import transformers
from tests.support.tokenizers_of_all_kinds import _corpus, byte_level

pytest.importorskip("xllamacpp", reason="extra llamacpp: not installed")
pytest.importorskip("gguf", reason="extra llamacpp: not installed")

from tokenizers import Tokenizer as HfTokenizer

from protocol import AbortCause, Feature, FinishReason, Grammar, GrammarKind, Sampling
from tools.to_gguf import convert
from worker.core import Event, Job, JobFinished, JobTokens
from worker.engine.build import build_engine as build_torch_engine
from worker.engines.llamacpp import library, vocabulary
from worker.engines.llamacpp.build import build_engine
from worker.engines.llamacpp.gguf_file import GgufFile
from worker.engines.llamacpp.model import (
    Context,
    ContextShape,
    LoadedModel,
    OutOfCells,
    Piece,
    StepAborted,
)
from worker.engines.llamacpp.options import Options
from worker.environment import nested
from worker.errors import BrokenCheckpoint, DeviceUnavailable, EngineMissing
from worker.loaded import LoadedEngine
from worker.settings import WorkerSettings
from worker.text import Tokenizer

FULL = Options(type_k="f32", type_v="f32")
STORY = "Once upon a time there was a little girl who"


def open_context(
    file: Path, *, cells: int = 512, batch_tokens: int = 512, unified: bool = True
) -> Context:
    model = LoadedModel(file, FULL, on_gpu=False)
    return Context(model, ContextShape(cells, 4, batch_tokens, unified), FULL, 1)


def make_folder(path: Path, kind: str = "llama", **changes: Any) -> Path:
    """A random checkpoint whose tokenizer has merges, which llama.cpp asks for."""
    folder = make_checkpoint(path, kind, vocab_size=1600, **changes)
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def context(demo_gguf: Path) -> Iterator[Context]:
    context = open_context(demo_gguf)
    yield context
    context.close()
    context.close()


def settings(file: Path, **changes: Any) -> WorkerSettings:
    values: dict[str, Any] = {
        "model_path": file,
        "engine": "llamacpp",
        "device": "cpu",
        "max_running": 6,
        "max_step_tokens": 32,
        "kv__blocks": 128,
        "engine_args": {"type_k": "f32", "type_v": "f32"},
    }
    return WorkerSettings(**nested(values | changes))


class Run:
    """An engine with a sink; what came of its jobs."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self.loaded = loaded
        self.texts: dict[Job, list[int]] = {}
        self.logprobs: dict[Job, list[float]] = {}
        self.ends: dict[Job, JobFinished] = {}
        self._changed = threading.Condition()
        loaded.engine.start(self._take)

    def _take(self, events: list[Event]) -> None:
        with self._changed:
            for event in events:
                if isinstance(event, JobTokens):
                    self.texts.setdefault(event.job, []).extend(event.ids)
                    told = self.logprobs.setdefault(event.job, [])
                    told += [one.logprob for one in event.logprobs or ()]
                elif isinstance(event, JobFinished):
                    self.ends[event.job] = event
            self._changed.notify_all()

    def submit(self, prompt: str | Sequence[int], deadline: float = math.inf, **asked: Any) -> Job:
        ids = self.loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        job = Job(ids, Sampling(**{"max_tokens": 24, "temperature": 0.0} | asked), deadline)
        self.loaded.engine.submit(job)
        return job

    def wait(self, *jobs: Job) -> list[list[int]]:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ends.keys() >= set(jobs), 60)
        return [self.texts.get(job, []) for job in jobs]

    def wait_for_tokens(self, job: Job, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.texts.get(job, ())) >= count, 60)


@pytest.fixture(scope="module")
def run(demo_gguf: Path) -> Iterator[Run]:
    run = Run(build_engine(settings(demo_gguf)))
    yield run
    run.loaded.engine.stop()


# ── numbers ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.5}}),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.5}}),
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": YARN | {"attention_factor": 0.7}}),
        ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
        ("llama", {"rope_parameters": YARN | {"mscale": 0.7}}),
        ("mistral", {"sliding_window": None, "rope_parameters": YARN | {"attention_factor": 1.0}}),
        ("qwen2", {}),
        ("qwen2", {"rope_parameters": YARN | {"attention_factor": 0.7}}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 16, "rope_parameters": YARN | {"mscale": 1, "mscale_all_dim": 1}}),
    ],
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    folder = make_folder(tmp_path / "checkpoint", kind, **changes)
    convert(folder, tmp_path / "m.gguf", "f32")
    context = open_context(tmp_path / "m.gguf")
    ids = [3, 200, 57, 120, 9, 33, 181, 64, 250, 18] * 10  # beyond what was trained, with YaRN
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0, -1].numpy()
    ours = context.compute([Piece(0, 0, ids, True)])[0].copy()
    context.close()
    np.testing.assert_allclose(ours, theirs, atol=2e-3 * float(np.abs(theirs).max()))


def test_a_head_that_is_stored_counts_though_it_is_said_to_be_tied(tmp_path: Path) -> None:
    """As in transformers, where it differs from the embedding."""
    folder = make_folder(tmp_path / "checkpoint", tie_word_embeddings=False)
    edit_config(folder, tie_word_embeddings=True)
    convert(folder, tmp_path / "m.gguf", "f32")
    context = open_context(tmp_path / "m.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([[3, 200, 57]])).logits[0, -1].numpy()
    ours = context.compute([Piece(0, 0, [3, 200, 57], True)])[0].copy()
    context.close()
    np.testing.assert_allclose(ours, theirs, atol=2e-3 * float(np.abs(theirs).max()))


def test_texts_and_log_probabilities_are_those_of_our_own_engine(run: Run) -> None:
    ours = Run(build_torch_engine(settings(DEMO, engine="torch", dtype="float32", engine_args={})))
    prompts = [STORY, "The old man went to the", "Tom and Lily were"]
    jobs = {one: [one.submit(prompt, logprobs=0) for prompt in prompts] for one in (run, ours)}
    texts = [one.wait(*jobs[one]) for one in (run, ours)]
    ours.loaded.engine.stop()
    assert texts[0] == texts[1]
    for mine, theirs in zip(jobs[run], jobs[ours], strict=True):
        assert run.logprobs[mine] == pytest.approx(ours.logprobs[theirs], abs=1e-2)


def test_company_changes_no_text(run: Run) -> None:
    alone = run.submit(STORY, temperature=1.0, seed=5, top_p=0.9)
    (expected,) = run.wait(alone)
    company = [run.submit(f"{STORY} {i}", temperature=1.0, seed=i) for i in range(4)]
    again = run.submit(STORY, temperature=1.0, seed=5, top_p=0.9)
    run.wait(*company)
    assert run.wait(again) == [expected]


def test_a_prompt_longer_than_a_step_is_read_in_pieces(run: Run, demo_gguf: Path) -> None:
    text = (STORY + " had a red hat. ") * 12
    (cut,) = run.wait(run.submit(text, max_tokens=8))
    whole = Run(build_engine(settings(demo_gguf, max_step_tokens=512)))
    (expected,) = whole.wait(whole.submit(text, max_tokens=8))
    whole.loaded.engine.stop()
    assert cut == expected


def test_a_conversation_is_not_read_twice(run: Run, demo_gguf: Path) -> None:
    prompt = run.loaded.tokenizer.encode(STORY + " liked to read in the garden.")
    first = run.submit(prompt, max_tokens=6)
    (answer,) = run.wait(first)
    again = run.submit([*prompt, *answer, *prompt], max_tokens=6)
    run.wait(again)
    known = len(prompt) + len(answer) - 1  # the last one drawn was never computed
    assert run.ends[again].cached_tokens >= known
    fresh = Run(build_engine(settings(demo_gguf, kv__prefix_cache=False)))
    other = fresh.submit([*prompt, *answer, *prompt], max_tokens=6)
    assert fresh.wait(other) == [run.texts[again]]
    assert fresh.ends[other].cached_tokens == 0
    fresh.loaded.engine.stop()


# ── steps that are stopped ───────────────────────────────────────────────────────────────────


def test_a_step_is_stopped_within_and_what_follows_is_right(
    context: Context,
) -> None:
    ids = Tokenizer.from_directory(DEMO).encode(STORY)
    expected = context.compute([Piece(0, 0, ids, True)])[0].copy()
    long = (ids * 50)[:400]
    context.stop(True)
    with pytest.raises(StepAborted):
        context.compute([Piece(1, 0, long, True)])
    context.stop(False)
    assert context.held(1) < len(long) and context.held(0) == len(ids)
    assert context.cut(1, 0)
    again = context.compute([Piece(1, 0, ids, True)])[0]
    np.testing.assert_allclose(again, expected, atol=1e-4)


def test_a_cancelled_prompt_ends_in_the_middle_of_its_step(
    monkeypatch: pytest.MonkeyPatch, demo_gguf: Path
) -> None:
    begun, was_stopped = threading.Event(), threading.Event()
    compute = Context.compute

    def watched(context: Context, pieces: Sequence[Piece]) -> Any:
        begun.set()
        try:
            return compute(context, pieces)
        except StepAborted:
            was_stopped.set()
            raise

    monkeypatch.setattr(Context, "compute", watched)
    run = Run(build_engine(settings(demo_gguf, max_step_tokens=2048)))
    job = run.submit([7 + i % 1000 for i in range(2000)], max_tokens=1)
    assert begun.wait(60)
    run.loaded.engine.cancel(job, AbortCause.CANCEL)
    run.wait(job)
    assert run.ends[job].reason is FinishReason.CANCELLED
    assert was_stopped.wait(60) and run.loaded.engine.stats().prefill_tokens_total == 0
    run.wait(run.submit(STORY))
    run.loaded.engine.stop()


def test_cells_run_out_loudly(demo_gguf: Path) -> None:
    context = open_context(demo_gguf, cells=256)
    with pytest.raises(OutOfCells):
        for sequence in range(4):
            context.compute([Piece(sequence, 0, [7] * 100, True)])
    context.close()


# ── vocabulary ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", sorted(vocabulary._PATTERNS))
def test_texts_are_cut_as_llama_cpp_cuts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = make_folder(tmp_path / "checkpoint", "qwen2")
    monkeypatch.setattr("tools.to_gguf._pattern_name", lambda stated: name)
    convert(folder, tmp_path / "m.gguf")
    model = LoadedModel(tmp_path / "m.gguf", Options(), on_gpu=False)
    file = GgufFile(tmp_path / "m.gguf")
    file.values.pop(vocabulary.ORIGINAL)
    tokenizer = Tokenizer(vocabulary.build_tokenizer(file), {}, "")
    texts = [*_corpus()[:20], "don't I'LL 1234 3.5\r\n\r\n\t x  y   z … ✓ naïve 12345 <=> a_b $5"]
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == model.tokenize(text)
    model.close()


def test_scores_are_read_as_llama_cpp_reads_them(demo_gguf: Path) -> None:
    model = LoadedModel(demo_gguf, Options(), on_gpu=False)
    file = GgufFile(demo_gguf)
    file.values.pop(vocabulary.ORIGINAL)
    tokenizer = Tokenizer(vocabulary.build_tokenizer(file), {}, "")
    for text in (STORY, "Two cats.\n\n“Hello”, said 3 dogs; é ✓!"):
        assert tokenizer.encode(text, add_special_tokens=False) == model.tokenize(text)
    model.close()


# ── what it says of itself ───────────────────────────────────────────────────────────────────


def test_the_card_says_what_it_is_and_what_it_lacks(run: Run) -> None:
    card = run.loaded.card
    assert card.model == "demo" and card.engine == "llamacpp"
    assert "llama.cpp b11549" in card.engine_version
    assert (card.context_tokens, card.full_context_tokens) == (2048, 2048)
    assert card.eos_token_ids == (1, 5) and card.quantization == "none"
    assert list(card.lacks) == sorted(card.lacks)
    assert Feature.EMBEDDINGS in card.lacks and Feature.STEP_ABORT not in card.lacks
    assert card.tokenizer_json == Tokenizer.from_directory(DEMO).json


def test_a_text_keeps_to_its_grammar(run: Run) -> None:
    pytest.importorskip("llguidance")
    assert run.loaded.grammars is not None
    job = Job(
        run.loaded.tokenizer.encode(STORY),
        Sampling(max_tokens=20, temperature=1.0, seed=1),
        math.inf,
        constraint=run.loaded.grammars.constraint(Grammar(GrammarKind.REGEX, "(yes|no){2}")),
    )
    run.loaded.engine.submit(job)
    (ids,) = run.wait(job)
    text = HfTokenizer.from_buffer(run.loaded.card.tokenizer_json).decode(ids)
    assert text in ("yesyes", "yesno", "noyes", "nono")
    assert run.ends[job].reason is FinishReason.STOP


def test_rounded_weights_make_a_text_too(tmp_path: Path) -> None:
    convert(DEMO, tmp_path / "demo.gguf", "q8_0")
    run = Run(build_engine(settings(tmp_path / "demo.gguf", engine_args={"kv_unified": "false"})))
    assert run.loaded.card.quantization == "q8_0"
    assert run.loaded.card.context_tokens < run.loaded.card.full_context_tokens
    texts = run.wait(*[run.submit(STORY) for _ in range(3)])
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 24
    run.loaded.engine.stop()


def test_another_build_of_llama_cpp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "version", lambda package: "2020.1.1")
    library.load_library.cache_clear()
    with pytest.raises(EngineMissing, match=r"2020\.1\.1 is installed: pip install"):
        library.load_library()
    library.load_library.cache_clear()


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        ({"device": "cuda"}, DeviceUnavailable, "computes on the CPU"),
        ({"deterministic": True}, ValueError, "TIDEGATE_WORKER__DETERMINISTIC is not for"),
        ({"quantize": "int8"}, ValueError, "TIDEGATE_WORKER__QUANTIZE is not for"),
        ({"max_running": 300}, ValueError, "256 sequences at most"),
        ({"kv__blocks": 0, "max_running": 200, "memory__hard_gib": 1e-6}, MemoryError, "KV cells"),
        ({"engine_args": {"n_gpu_layer": "1"}}, ValueError, "did you mean n_gpu_layers"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    demo_gguf: Path, changes: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        build_engine(settings(demo_gguf, **changes))


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, demo_gguf: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(demo_gguf.read_bytes()[:-100_000])
    with pytest.raises(BrokenCheckpoint, match="the file is cut"):
        build_engine(settings(broken))
