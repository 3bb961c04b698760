"""WK-7: another model in the same process; what fails leaves the old one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from protocol import (
    PROTOCOL_VERSION,
    AbortCause,
    Code,
    FinishReason,
    KvReport,
    Loadable,
    Open,
    Sampling,
    Submit,
    Swap,
    SwapPhase,
    SwapReport,
)
from tests.support.triton_calls import FakeEngine, FakeResponder, lane_call
from tests.worker.runner.test_memory import FakeMeter
from tests.worker.service.conftest import Harness, loaded_by, serving
from worker.core import Clock, JobFinished
from worker.environment import nested
from worker.errors import BrokenCheckpoint, EngineMissing, InvalidCall, MemoryLimitExceeded
from worker.loaded import LoadedEngine
from worker.service import swap as swapping
from worker.service import swap_checks
from worker.settings import WorkerSettings
from worker.text import Tokenizer


class Models:
    """Loads fake engines. ``broken`` are names that fail."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.engines: list[FakeEngine] = []
        self.asked: list[str] = []
        self.broken: set[str] = set()
        self.unfit: Exception | None = None
        self.may_load = threading.Event()
        self.may_load.set()

    def load(self, settings: WorkerSettings, clock: Clock) -> LoadedEngine:
        name = swap_checks.name_of(settings)
        self.asked.append(name)
        assert self.may_load.wait(60)
        if name in self.broken:
            raise BrokenCheckpoint(f"{name} is no model")
        engine = FakeEngine()
        self.engines.append(engine)
        return loaded_by(self.tokenizer, engine, name)

    def check(self, *_: object) -> None:
        if self.unfit is not None:
            raise self.unfit


@pytest.fixture
def models(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Models:
    models = Models(tokenizer)
    monkeypatch.setattr(swapping, "check", models.check)
    # A real one walks through all that the suite has loaded: three seconds for each swap.
    monkeypatch.setattr(swapping, "meter_of", lambda settings: FakeMeter(0, 0))
    return models


@pytest.fixture
def harness(models: Models) -> Iterator[Harness]:
    with serving(models.tokenizer, load=models.load, model_name="first") as harness:
        yield harness


def swap(harness: Harness, name: str, grace_ms: float = 5000.0, **more: str) -> FakeResponder:
    return harness.send(Swap({"model_path": f"/models/{name}", **more}, grace_ms))


def reports(responder: FakeResponder) -> list[SwapReport]:
    return [frame.swap for frame in responder.frames() if frame.swap is not None]


def outcome(responder: FakeResponder) -> SwapReport:
    responder.wait_final()
    assert responder.error is None, responder.error
    return reports(responder)[-1]


def phases(responder: FakeResponder) -> list[str]:
    return [report.phase.value for report in reports(responder)]


def test_wk7_another_model_is_loaded_and_announced_on_the_same_lane(
    harness: Harness, models: Models
) -> None:
    harness.engine.reports.append(KvReport([b"old"], [], full=True))
    done = swap(harness, "second")
    report = outcome(done)
    assert (report.phase, report.model, report.was) == (SwapPhase.DONE, "second", "fake")
    assert list(report.ms) == ["check", "drain", "evict", "unload", "load"]
    assert phases(done) == [*report.ms, "done"]
    cards = [frame.card for frame in harness.lane.frames() if frame.card is not None]
    assert [(card.model, card.serving) for card in cards] == [("fake", 0), ("second", 1)]
    announced = next(f for f in harness.lane.frames() if f.card is cards[-1] or f.card == cards[-1])
    assert not announced.draining
    assert announced.cache is not None and announced.cache.full and not announced.cache.added
    assert harness.lane.finals == 0, "the lane continues"


def test_wk7_what_runs_finishes_and_what_waits_is_handed_back(
    harness: Harness, models: Models
) -> None:
    running, _ = harness.submit(1)
    waiting, _ = harness.submit(2)
    harness.start(running)
    done = swap(harness, "second")
    assert harness.engine.wait_cancelled(1) == [(waiting, AbortCause.DRAIN)]
    harness.lane.wait(lambda: any(f.draining for f in harness.lane.frames()), "the drain")
    assert "second" in [f.swap.model for f in harness.lane.frames() if f.swap is not None]
    late = harness.send(Submit("lane", 3, [1], Sampling(max_tokens=1), 1000.0))
    late.wait_final()
    assert harness.wait_end(3).code is Code.DRAINING
    harness.speak(running, "to the end")
    harness.finish(running)
    assert outcome(done).phase is SwapPhase.DONE
    assert harness.wait_end(1).reason is FinishReason.LENGTH
    assert harness.text(1) == "to the end"


def test_wk7_token_ids_of_the_old_model_never_reach_the_new_one(
    harness: Harness, models: Models
) -> None:
    outcome(swap(harness, "second"))
    harness.send(Submit("lane", 7, [1], Sampling(max_tokens=1), 1000.0))
    assert harness.wait_end(7).code is Code.DRAINING
    assert models.engines[0].submitted == []


def test_wk7_a_model_that_cannot_be_loaded_leaves_the_old_one(
    harness: Harness, models: Models
) -> None:
    models.broken = {"second"}
    report = outcome(swap(harness, "second"))
    assert report.phase is SwapPhase.FAILED
    assert "second is no model" in report.error
    assert "restore" in report.ms
    assert models.asked == ["second", "first"]
    harness.send(Submit("lane", 1, [1], Sampling(max_tokens=1), 1000.0, serving=1))
    (job,) = models.engines[0].wait_submitted(1)
    models.engines[0].emit(
        JobFinished(job, FinishReason.LENGTH, None, "", 1, 0, 0, 0.0, 0.0, 0.0, 0.0, None)
    )
    assert harness.wait_end(1).reason is FinishReason.LENGTH


def test_wk7_what_can_be_known_before_costs_not_even_a_drain(
    harness: Harness, models: Models
) -> None:
    models.unfit = MemoryLimitExceeded("it is too large")
    report = outcome(swap(harness, "second"))
    assert (report.phase, report.error) == (SwapPhase.FAILED, "it is too large")
    assert models.asked == []
    assert not any(frame.draining for frame in harness.lane.frames())


def test_wk7_where_neither_can_be_loaded_the_process_ends(harness: Harness, models: Models) -> None:
    models.broken = {"second", "first"}
    ended, asked = threading.Event(), threading.Event()
    harness.service._swapper._die = lambda: (ended.set(), asked.wait(60))
    report = outcome(swap(harness, "second"))
    assert ended.wait(60)
    assert report.phase is SwapPhase.FAILED
    assert "cannot be loaded again" in report.error
    assert "is swapping" in swap(harness, "third").refusal()[1], "until then no other begins"
    asked.set()


def test_wk7_a_drain_that_does_not_end_is_given_up(
    harness: Harness, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapping, "DRAIN_SLACK_S", 0.1)
    harness.engine.on_cancel = lambda job, cause: None  # an engine that is stuck
    job, _ = harness.submit(1)
    harness.begin(job)
    report = outcome(swap(harness, "second", grace_ms=0.0))
    assert report.phase is SwapPhase.FAILED and "jobs were still there" in report.error
    harness.finish(job)
    harness.wait_end(1)
    other, _ = harness.submit(2)
    harness.finish(other)
    assert harness.wait_end(2).reason is FinishReason.LENGTH


def test_wk7_one_at_a_time_and_the_same_one_again_is_joined(
    harness: Harness, models: Models
) -> None:
    models.may_load.clear()
    first = swap(harness, "second")
    first.wait(lambda: "load" in phases(first), "the load")
    other = swap(harness, "third")
    assert other.refusal()[0] == Code.NOT_READY
    joined = swap(harness, "second")
    models.may_load.set()
    assert outcome(first).phase is outcome(joined).phase is SwapPhase.DONE
    assert models.asked == ["second"]
    assert outcome(swap(harness, "second")).ms == {}, "it is there"
    assert models.asked == ["second"]


def test_wk7_a_worker_can_be_stopped_while_it_swaps(models: Models) -> None:
    with serving(models.tokenizer, load=models.load) as harness:
        job, _ = harness.submit(1)
        harness.start(job)
        harness.engine.on_cancel = lambda job, cause: harness.finish(
            job, FinishReason.CANCELLED, Code.DRAINING
        )
        done = swap(harness, "second")
        done.wait(lambda: "drain" in phases(done), "the drain")
    assert job.abort is AbortCause.DRAIN


def test_wk7_a_lane_that_is_opened_as_the_model_changes_has_the_new_card(harness: Harness) -> None:
    """Else all that it brings would be refused as the old model's for as long as it is open."""
    service, gate = harness.service, threading.Event()
    new = msgspec.structs.replace(service.serving.card, model="second", serving=1)

    def place() -> None:
        service._swapper.serving = replace(service.serving, card=new)
        service.emitter.describe_all(new)

    service.emitter.post(lambda: gate.wait(60) or None)
    service.emitter.post(place)
    other = FakeResponder()
    service.accept(lane_call(Open(PROTOCOL_VERSION, "other", ""), other))
    gate.set()
    other.wait(lambda: other.sent, "the first frame")
    card = other.frames()[0].card
    assert card is not None and card.serving == 1
    other.cancelled = True
    other.wait_final()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({}, "model_path"),
        ({"model_name": "unheard"}, "knows no model"),
        ({"model_path": "/m", "lane_token": "x"}, "process's own"),
        (
            {"model_path": "/m", "plain.token": "x"},
            "cannot set plain.token: it is the process's own",
        ),
        ({"model_path": "/m", "colour": "x"}, "not a worker setting"),
        ({"model_path": "/m", "kv.bloks": "1"}, "did you mean kv.blocks?"),
        ({"model_path": "/m", "kv": "{}"}, "set kv: not a worker setting"),
        ({"model_path": "/m", "KV_BLOCKS": "1"}, "did you mean kv.blocks?"),
        ({"model_path": "/m", "max_running": "none"}, "do not fit: max_running: "),
        ({"model_path": "/m", "kv.blocks": "none"}, "do not fit: kv.blocks: "),
    ],
)
def test_wk7_what_makes_no_sense_is_refused_at_once(
    harness: Harness, settings: dict[str, str], word: str
) -> None:
    code, message = harness.send(Swap(settings)).refusal()
    assert code == Code.INVALID_REQUEST and word in message


def test_wk7_only_who_has_the_lane_token_may(models: Models) -> None:
    with serving(models.tokenizer, load=models.load, token="key", lane_token="key") as harness:
        answer = swap(harness, "second")
        assert answer.refusal()[0] == Code.UNAUTHENTICATED


def test_wk7_models_that_the_settings_list_are_in_the_card_and_need_no_path(
    models: Models, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    known = {"second": str(tmp_path)}
    with serving(models.tokenizer, load=models.load, model_name="fake", models=known) as harness:
        (card,) = [f.card for f in harness.lane.frames() if f.card is not None]
        assert card.loadable == (Loadable("fake", 0, 1234.5), Loadable("second", 8, 0.0))
        assert outcome(harness.send(Swap({"model_name": "second"}, 1000.0))).model == "second"
        card = [f.card for f in harness.lane.frames() if f.card is not None][-1]
        assert card.loadable[1] == Loadable("second", 8, 1234.5)
        assert outcome(harness.send(Swap({"model_name": "fake"}, 1000.0))).model == "fake"


def test_or2_the_model_that_is_served_is_loaded_again_only_where_that_is_asked_for(
    harness: Harness, models: Models
) -> None:
    outcome(swap(harness, "second"))
    assert outcome(swap(harness, "second")).ms == {}
    done = outcome(harness.send(Swap({"model_name": "whatever"}, 1000.0, anew=True)))
    assert (done.model, done.was) == ("second", "second")
    assert list(done.ms) == ["check", "drain", "evict", "unload", "load"]
    assert models.asked == ["second", "second"]
    assert harness.service.serving.card.serving == 2


def _settings(**changes: object) -> WorkerSettings:
    values: dict[str, object] = {"model_path": "/m", "device": "cpu"}
    return WorkerSettings(**nested(values | changes))


MIB = 2**20


@pytest.mark.parametrize(
    ("free_mib", "changes", "fits"),
    [
        (110, {}, True),
        (1000, {"memory__hard_gib": 0.25}, True),
        (10, {}, False),
        (1000, {"memory__hard_gib": 0.15}, False),
    ],
)
def test_wk7_the_new_model_needs_room_once_the_old_one_is_gone(
    monkeypatch: pytest.MonkeyPatch, free_mib: int, changes: dict[str, object], fits: bool
) -> None:
    """The new one takes 100 MiB, 125 while it loads; the old one 80 of the 150 in use."""
    sizes: dict[str, int] = {"old": 80 * MIB, "new": 100 * MIB}
    weigh: Callable[[WorkerSettings], int] = lambda settings: sizes[settings.model_path.name]  # noqa: E731
    monkeypatch.setattr(swap_checks, "weight_bytes", weigh)
    monkeypatch.setattr(swap_checks, "_check_files", lambda settings: None)
    target, current = _settings(model_path="/new", **changes), _settings(model_path="/old")
    meter = FakeMeter(150 * MIB, free_mib * MIB)
    refused = pytest.raises(MemoryLimitExceeded, match="new needs about")
    with nullcontext() if fits else refused:
        swap_checks.check(target, current, meter)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"kv__blocks": 30, "engine": "vllm", "tensor_parallel": 2}, True),
        ({"kv__blocks": 10}, True),
        ({"kv__blocks": 30}, False),
    ],
)
def test_wk7_on_a_gpu_the_new_pool_needs_room_and_the_old_one_makes_some(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], fits: bool
) -> None:
    """The new one's weights take 100 MiB, and each of its blocks 30; 800 MiB are in use, of which
    the old one's weights are 80."""
    sizes = {"old": 80 * MIB, "new": 100 * MIB}
    monkeypatch.setattr(swap_checks, "weight_bytes", lambda of: sizes[of.model_path.name])
    monkeypatch.setattr(swap_checks, "_check_files", lambda settings: None)
    monkeypatch.setattr(swap_checks, "read_config", lambda path: None)
    monkeypatch.setattr(swap_checks, "_number_bytes", lambda settings, config: 2)
    monkeypatch.setattr(swap_checks, "block_bytes", lambda config, tokens, each: 30 * MIB)
    target = _settings(model_path="/new", device="cuda", **changes)
    current = _settings(model_path="/old", device="cuda")
    meter = FakeMeter(800 * MIB, 10 * MIB)
    words = r"needs about 0\.98 GiB .* leaves 0\.79 GiB"
    with nullcontext() if fits else pytest.raises(MemoryLimitExceeded, match=words):
        swap_checks.check(target, current, meter)


def test_wk7_a_swap_changes_what_it_names_and_nothing_else() -> None:
    started = _settings(max_running=3, model_name="first", kv__prefix_cache=False)
    target = swap_checks.target_settings(started, {"model_path": "/other", "kv.blocks": "9"})
    assert (target.max_running, target.kv.blocks, target.model_name) == (3, 9, "")
    assert not target.kv.prefix_cache
    back = swap_checks.target_settings(started, {"model_name": "first"})
    assert back == started
    assert msgspec.to_builtins(back.model_path.name) == "m"


def test_adapters_stay_with_the_model_that_they_were_named_for() -> None:
    started = WorkerSettings(model_path=Path("/m"), adapters={"tone": Path("/tone")})
    assert not swap_checks.target_settings(started, {"model_path": "/other"}).adapters
    assert swap_checks.target_settings(started, {"model_path": "/m"}).adapters == started.adapters
    with pytest.raises(InvalidCall, match="cannot set adapters: it is the process's own"):
        swap_checks.target_settings(started, {"model_path": "/m", "adapters": "{}"})


def test_wk7_an_engine_that_is_not_installed_is_found_out_before_anything_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_checks, "find_spec", lambda name: None)
    target = _settings(model_path=tmp_path, engine="vllm")
    with pytest.raises(EngineMissing, match=r"not installed.*tidegate engines ensure vllm"):
        swap_checks.check(target, _settings(engine="synthetic-free"), FakeMeter(0, 2**40))


@pytest.mark.parametrize(
    ("engine", "files", "problem"),
    [
        ("torch", {"m.gguf": b"GGUF"}, "m.gguf. is in GGUF"),
        ("torch", {"config.json": b"{}"}, "model.safetensors is missing"),
        ("vllm", {"model.safetensors": b""}, "no config.json"),
    ],
)
def test_wk7_files_of_other_engines_are_looked_at_before_anything_is_drained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    files: dict[str, bytes],
    problem: str,
) -> None:
    monkeypatch.setattr(swap_checks, "find_spec", lambda name: True)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    target = _settings(model_path=tmp_path, engine=engine)
    with pytest.raises(BrokenCheckpoint, match=problem):
        swap_checks.check(target, _settings(engine="synthetic-free"), FakeMeter(0, 2**40))


def test_wk7_all_parts_of_a_model_are_weighed(tmp_path: Path) -> None:
    for i in (1, 2, 3):
        (tmp_path / f"model-{i:05}-of-00003.safetensors").write_bytes(bytes(100))
    assert swap_checks.file_bytes(tmp_path) == 300
    assert swap_checks.file_bytes(tmp_path / "nothing") == 0
