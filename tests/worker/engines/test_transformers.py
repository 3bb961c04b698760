"""Architectures that our own decoder does not run, by the library's code for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol import AbortCause, Code, Feature, FinishReason, Sampling
from tests.support.checkpoints import DEMO, edit_config, make_checkpoint
from tests.support.engine import end_of, ids_of
from tests.support.lazy import transformers
from tests.worker.engine.test_engine_thread import Collector
from worker.core import Event, Job
from worker.engine.build import build_engine as build_our_engine
from worker.engines import load_engine
from worker.engines.stepped import SteppedEngine
from worker.engines.transformers.backend import TransformersBackend
from worker.engines.transformers.batches import PaddedBatch, SeparateTexts
from worker.engines.transformers.decoder import LibraryDecoder
from worker.environment import nested
from worker.errors import BrokenCheckpoint, EngineMissing, UnsupportedModel
from worker.loaded import LoadedEngine
from worker.runner.device_probe import DeviceProbe
from worker.settings import WorkerSettings

GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 8, "pad_token_id": None}
ARCHITECTURES: dict[str, tuple[dict[str, object], bool]] = {
    "gpt2": ({}, True),
    "gpt_neox": ({}, True),
    "phi": ({"num_key_value_heads": 6}, True),
    "gemma2": (GEMMA, True),
    "bloom": ({}, True),
    "mamba": ({"state_size": 4, "conv_kernel": 3}, False),
}
"""Tiny changes to a tiny configuration, and whether its texts can be padded."""
FAR = 1e12
LENGTHS = (3, 17, 9, 1, 26)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bool]:
    changes, is_batched = ARCHITECTURES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(path, request.param, **changes), is_batched


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpt2"), "gpt2")


def settings(path: Path, **changes: object) -> WorkerSettings:
    values = {
        "model_path": path,
        "engine": "transformers",
        "device": "cpu",
        "max_running": 3,
        "max_step_tokens": 8,
    } | changes
    return WorkerSettings(**nested(values))


def load(path: Path, **changes: object) -> LoadedEngine:
    return load_engine(settings(path, **changes))


def finish(loaded: LoadedEngine, jobs: list[Job], look: Callable[[], None] = int) -> list[Event]:
    engine = loaded.engine
    assert isinstance(engine, SteppedEngine)
    for job in jobs:
        engine.submit(job)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
        look()
    return events


def prompt(length: int) -> list[int]:
    return [3 + (7 * i + length) % 250 for i in range(length)]


def greedy(ids: list[int], tokens: int = 12, **changes: object) -> Job:
    asked = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True} | changes
    return Job(ids, Sampling(**asked), FAR)  # type: ignore[arg-type]


def test_greedy_texts_are_those_of_generate(checkpoint: tuple[Path, bool]) -> None:
    """In company that comes and goes, prompts of all lengths in chunks."""
    path, is_batched = checkpoint
    loaded = load(path)
    jobs = [greedy(prompt(length), 5 + length % 9) for length in LENGTHS]
    events = finish(loaded, jobs)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for job in jobs:
        ids = torch.tensor([list(job.token_ids)])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=job.sampling.max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ids_of(job, events) == expected[0, len(job.token_ids) :].tolist()
    engine = loaded.engine
    assert isinstance(engine, SteppedEngine)
    texts = engine._backend._texts  # type: ignore[attr-defined]
    assert isinstance(texts, PaddedBatch if is_batched else SeparateTexts)
    stats = engine.stats()
    assert stats.prefill_tokens_total == sum(LENGTHS)
    assert (stats.kv_blocks_used, stats.running) == (0, 0)
    engine.stop()


def test_texts_that_cannot_be_padded_are_computed_alone(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the reason: a trial at load compares the logits."""
    step = PaddedBatch.step
    monkeypatch.setattr(PaddedBatch, "step", lambda self, ids: step(self, ids).flip(0))
    with caplog.at_level("INFO"):
        loaded = load(gpt2)
    assert "cannot be padded" in caplog.text and "one text after the other" in caplog.text
    job = greedy(prompt(9), 6)
    assert end_of(job, finish(loaded, [job])).completion_tokens == 6
    loaded.engine.stop()


def test_the_card_says_what_it_is_not(gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        loaded = load(gpt2, kv__blocks=4)
    card = loaded.card
    assert card.engine == "transformers" and not card.can_pause and card.can_continue
    assert {Feature.EMBEDDINGS, Feature.KV_EVENTS, Feature.PROMPT_LOGPROBS} <= set(card.lacks)
    assert list(card.lacks) == sorted(card.lacks)
    assert (card.context_tokens, card.full_context_tokens) == (64, 128)
    assert "slower than our own engine" in caplog.text
    loaded.engine.stop()


def test_texts_wait_for_memory_and_all_get_their_turn(gpt2: Path) -> None:
    """A pool of one long text: in a batch, each is as wide as the widest."""
    loaded = load(gpt2, kv__blocks=5)
    engine = loaded.engine
    assert isinstance(engine, SteppedEngine)
    most = 0

    def look() -> None:
        nonlocal most
        stats = engine.stats()
        most = max(most, stats.waiting)
        assert stats.kv_blocks_used <= stats.kv_blocks_total == 5

    jobs = [greedy(prompt(20), 20) for _ in range(3)] + [greedy(prompt(60), 15)]
    events = finish(loaded, jobs, look)
    assert [end_of(job, events).reason for job in jobs] == [FinishReason.LENGTH] * 4
    assert most >= 2
    engine.stop()


def test_an_abort_frees_rows_at_once(gpt2: Path) -> None:
    loaded = load(gpt2)
    engine = loaded.engine
    assert isinstance(engine, SteppedEngine)
    stays, goes = greedy(prompt(5), 30), greedy(prompt(40), 30)
    for job in (stays, goes):
        engine.submit(job)
    events = [event for _ in range(12) for event in engine.step()]
    texts = engine._backend._texts  # type: ignore[attr-defined]
    assert len(texts.handles) == 2
    engine.cancel(goes, AbortCause.CANCEL)
    events += engine.step()
    assert end_of(goes, events).code is Code.CANCELLED
    assert len(texts.handles) == 1
    assert texts._cache.layers[0].keys.shape[2] < 40
    while engine.has_work:
        events += engine.step()
    alone = greedy(prompt(5), 30)
    assert ids_of(stays, events) == ids_of(alone, finish(loaded, [alone]))
    engine.stop()


def test_a_step_that_fails_ends_its_jobs_and_no_others(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(gpt2)
    bad, after = greedy(prompt(5)), greedy(prompt(6))
    with monkeypatch.context() as patch:
        patch.setattr(LibraryDecoder, "run", lambda *args: 1 / 0)
        end = end_of(bad, finish(loaded, [bad]))
    assert end.code is Code.ENGINE_ERROR
    assert "could not be read" in caplog.text
    assert end_of(after, finish(loaded, [after])).reason is FinishReason.LENGTH
    loaded.engine.stop()


@pytest.mark.parametrize("while_reading", [True, False])
def test_a_device_that_is_lost_takes_the_engine_with_it(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch, while_reading: bool
) -> None:
    loaded, jobs = load(gpt2), [greedy(prompt(5)), greedy(prompt(6))]
    engine, sink = loaded.engine, Collector()
    assert isinstance(engine, SteppedEngine)
    assert isinstance(engine._backend, TransformersBackend)

    def fail(*args: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine._backend._probe = DeviceProbe(fail, timeout_s=60.0)
    for job in jobs:
        engine.submit(job)
    if not while_reading:
        for _ in range(3):
            sink(engine.step())
    monkeypatch.setattr(LibraryDecoder, "run", fail)
    engine.start(sink)
    sink.wait_ended(2)
    assert engine.has_failed
    assert {end_of(job, sink.events).code for job in jobs} == {Code.INSTANCE_LOST}


def test_a_text_that_is_not_finite_ends_and_no_other(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WK-12."""
    loaded = load(gpt2)
    sound = greedy(prompt(5), 6)
    expected = ids_of(sound, finish(loaded, [sound]))
    run_decoder = LibraryDecoder.run

    def with_nan(self: LibraryDecoder, ids: torch.Tensor, *rest: object) -> object:
        logits, cache = run_decoder(self, ids, *rest)  # type: ignore[arg-type]
        if ids.shape[1] == 7:
            logits = logits.clone()
            logits[-1, 3] = torch.nan
        return logits, cache

    monkeypatch.setattr(LibraryDecoder, "run", with_nan)
    sound, spoilt = greedy(prompt(5), 6), greedy(prompt(7), 6)
    events = finish(loaded, [sound, spoilt])
    assert end_of(spoilt, events).code is Code.NOT_FINITE and not ids_of(spoilt, events)
    assert ids_of(sound, events) == expected
    assert loaded.engine.stats().not_finite_total == 1
    loaded.engine.stop()


def test_an_architecture_of_others_is_pointed_here(gpt2: Path) -> None:
    with pytest.raises(UnsupportedModel, match="TIDEGATE_WORKER__ENGINE=transformers"):
        build_our_engine(settings(gpt2, engine="torch"))


def test_code_of_a_checkpoint_is_not_run_unasked(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt2")
    edit_config(
        path,
        model_type="mine",
        architectures=["MineForCausalLM"],
        auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    )
    (path / "mine.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UnsupportedModel, match="TIDEGATE_WORKER__TRUST_REMOTE_CODE"):
        load(path)


def test_what_the_library_cannot_load_is_said(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt2")
    edit_config(path, model_type="no-such-thing", architectures=["NoSuchThing"])
    with pytest.raises(UnsupportedModel, match="cannot be run by transformers"):
        load(path)
    (path / "config.json").unlink()
    with pytest.raises(BrokenCheckpoint, match=r"config\.json is missing"):
        load(path)


def test_models_that_translate_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt2")
    edit_config(path, model_type="t5", architectures=["T5ForConditionalGeneration"])
    with pytest.raises(UnsupportedModel, match="models that continue a text"):
        load(path)


def test_a_missing_library_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(EngineMissing, match="pip install 'transformers>=5'"):
        load(DEMO)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_texts_on_cuda_are_those_on_the_cpu(gpt2: Path) -> None:
    def texts(device: str) -> list[list[int]]:
        loaded = load(gpt2, device=device, dtype="float32")
        jobs = [greedy(prompt(length)) for length in LENGTHS]
        events = finish(loaded, jobs)
        loaded.engine.stop()
        return [ids_of(job, events) for job in jobs]

    assert texts("cuda") == texts("cpu")
