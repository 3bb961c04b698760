from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

from protocol import (
    PROTOCOL_VERSION,
    Code,
    Delta,
    End,
    FinishReason,
    LaneMessage,
    Open,
    Sampling,
    Submit,
)
from tests.support.clock import MovedClock
from tests.support.fake_worker import make_card
from tests.support.triton_calls import FakeEngine, FakeResponder, lane_call
from worker.core import EngineService, Job, JobFinished, JobStarted, JobTokens
from worker.engines import load_engine
from worker.environment import nested
from worker.loaded import EngineLoader, LoadedEngine
from worker.service.worker import Worker
from worker.settings import WorkerSettings
from worker.text.tokenizer import Tokenizer


def byte_tokenizer() -> bytes:
    """A tokenizer whose ids 0 to 255 are the bytes in GPT-2's order: any text, no training."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = LibraryTokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return str(library.to_str()).encode()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), {}, "")


@dataclass
class Harness:
    """A worker over a fake engine, with a lane open."""

    service: Worker
    engine: FakeEngine
    """The one that it was started with."""
    tokenizer: Tokenizer
    clock: MovedClock
    """The worker's."""
    lane: FakeResponder = field(default_factory=FakeResponder)

    def send(self, message: LaneMessage) -> FakeResponder:
        responder = FakeResponder()
        self.service.accept(lane_call(message, responder))
        return responder

    def open(self, token: str = "") -> None:
        self.service.accept(lane_call(Open(PROTOCOL_VERSION, "lane", token), self.lane))
        self.lane.wait(lambda: self.lane.sent, "the first frame")

    def submit(self, handle: int, **sampling: object) -> tuple[Job, FakeResponder]:
        known = len(self.engine.submitted)
        parameters = {"max_tokens": 100} | sampling
        responder = self.send(
            Submit("lane", handle, [1, 2], Sampling(**parameters), 10_000.0)  # type: ignore[arg-type]
        )
        return self.engine.wait_submitted(known + 1)[known], responder

    def speak(self, job: Job, text: str) -> list[int]:
        ids = self.tokenizer.encode(text)
        self.engine.emit(JobTokens(job, ids, None))
        return ids

    def finish(
        self, job: Job, reason: FinishReason = FinishReason.LENGTH, code: Code | None = None
    ) -> None:
        self.engine.emit(JobFinished(job, reason, code, "", 2))

    def begin(self, job: Job) -> None:
        job.has_started = True
        self.engine.emit(JobStarted(job, 1.5))

    def start(self, job: Job) -> None:
        """``begin``, and the lane has told of it."""
        self.begin(job)
        self.lane.wait(lambda: any(f.started for f in self.lane.frames()), "the start")

    def deltas(self, handle: int) -> list[Delta]:
        return [d for f in self.lane.frames() for d in f.deltas if d.handle == handle]

    def text(self, handle: int) -> str:
        return "".join(text for delta in self.deltas(handle) for text in delta.texts)

    def ends(self) -> list[End]:
        return [end for frame in self.lane.frames() for end in frame.ends]

    def wait_end(self, handle: int) -> End:
        self.lane.wait(lambda: any(e.handle == handle for e in self.ends()), f"End({handle})")
        (end,) = [end for end in self.ends() if end.handle == handle]
        return end


def loaded_by(tokenizer: Tokenizer, engine: EngineService, model: str = "fake") -> LoadedEngine:
    """What a loader would have made."""
    card = make_card(
        model=model,
        context_tokens=128,
        vocab_size=256,
        tokenizer_json=b"",
        chat_template="",
        special_tokens={},
        bos_token_id=None,
        eos_token_ids=(),
        max_running=4,
        max_waiting=4,
    )
    return LoadedEngine(engine, tokenizer, card, {"total": 1234.5})


@contextmanager
def serving(
    tokenizer: Tokenizer,
    *,
    token: str = "",
    load: EngineLoader = load_engine,
    die: Callable[[], None] = lambda: pytest.fail("the worker ended its process"),
    device_fault: Callable[[], str] = str,
    **changes: object,
) -> Iterator[Harness]:
    """A worker with ``changes`` to its settings, and a lane that was opened with ``token``;
    ``load`` makes the engines that it swaps to; ``die`` stands for the end of the process, and
    ``device_fault`` for what NVIDIA's driver says."""
    engine = FakeEngine()
    values: dict[str, object] = {"model_path": "unused"}
    settings = WorkerSettings(**nested(values | changes))
    clock = MovedClock()
    service = Worker(
        loaded_by(tokenizer, engine),
        settings,
        load=load,
        die=die,
        clock=clock,
        device_fault=device_fault,
    )
    service.start()
    harness = Harness(service, engine, tokenizer, clock)
    # an abort is answered the way the real engine answers it
    codes = {"stop_string": (FinishReason.STOP, None)}
    engine.on_cancel = lambda job, cause: harness.finish(
        job, *codes.get(cause.value, (FinishReason.CANCELLED, Code.CANCELLED))
    )
    harness.open(token)
    yield harness
    service.close()
    assert harness.lane.finals == 1, "every request ends in exactly one final response"
    assert not harness.lane.asked_after_final


@pytest.fixture
def harness(tokenizer: Tokenizer) -> Iterator[Harness]:
    with serving(tokenizer) as harness:
        yield harness
