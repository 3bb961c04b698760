"""Images through ``transformers``: tiny random models of the kinds that read them."""

import io
import logging
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol import AbortCause, Code, Feature, FinishReason, Sampling, Vision
from tests.support.checkpoints import make_vision_checkpoint
from tests.support.engine import end_of, ids_of
from tests.support.lazy import transformers
from tests.support.pictures import picture
from tests.worker.engines.test_transformers import FAR, finish, greedy, load
from worker.core import Event, Job, JobFinished, JobTokens
from worker.engines.images import MAX_PIXELS
from worker.engines.stepped import SteppedEngine
from worker.engines.transformers.batches import PaddedBatch
from worker.loaded import LoadedEngine

pytestmark = pytest.mark.slow

SIZES = ((40, 24), (16, 16), (64, 8))


class Model:
    """A model that reads images, beside the library's own way to run it."""

    def __init__(self, path: Path, loaded: LoadedEngine) -> None:
        self.path = path
        self.loaded = loaded
        assert loaded.card.vision is not None
        self.vision: Vision = loaded.card.vision

    def prompt(self, *sizes: tuple[int, int], text: int = 20) -> list[int]:
        """Text with images of these sizes in it, as an orchestrator sends it."""
        ids = [5, 6, 7]
        for size in sizes:
            ids += [*[self.vision.token_id] * self.vision.tokens_of(*size), 8, 9]
        return ids + [3 + (7 * i) % 200 for i in range(text)]

    def generated(
        self, ids: Sequence[int], files: Sequence[bytes], tokens: int
    ) -> list[tuple[int, float]]:
        """The library's own text, greedy, with the log-probability of each token."""
        from PIL import Image

        model = transformers.AutoModelForImageTextToText.from_pretrained(
            self.path, dtype=torch.float32
        )
        processor = transformers.AutoImageProcessor.from_pretrained(self.path)
        images = [Image.open(io.BytesIO(file)) for file in files]
        prompt = torch.tensor([list(ids)])
        kinds: dict[str, Any] = {}
        if model.config.model_type == "qwen2_vl":
            kinds["mm_token_type_ids"] = (prompt == self.vision.token_id).int()
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **processor(images=images, return_tensors="pt"),
            **kinds,
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new: list[int] = found.sequences[0, len(ids) :].tolist()
        scores = [step[0].log_softmax(-1) for step in found.logits]
        return [(one, float(row[one])) for one, row in zip(new, scores, strict=True)]


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    path = make_vision_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    model = Model(path, load(path))
    yield model
    model.loaded.engine.stop()


def seeing(ids: Sequence[int], files: Sequence[bytes], tokens: int = 12, begun: int = 0) -> Job:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    return Job(ids, sampling, FAR, images=files, begun_tokens=begun)


def engine_of(loaded: LoadedEngine) -> SteppedEngine:
    assert isinstance(loaded.engine, SteppedEngine)
    return loaded.engine


def scored(job: Job, events: list[Event]) -> list[tuple[int, float]]:
    """A job's tokens with their log-probabilities."""
    told = [event for event in events if isinstance(event, JobTokens) and event.job is job]
    return [
        (token, one.logprob)
        for event in told
        for token, one in zip(event.ids, event.logprobs or (), strict=True)
    ]


def test_the_card_says_how_images_are_counted(model: Model) -> None:
    """One kind of model has a number for all images, the other one by their sizes."""
    counts = [model.vision.tokens_of(*size) for size in SIZES]
    assert counts in ([16, 16, 16], [15, 4, 8])
    assert model.vision.token == "<|image|>"
    assert Feature.IMAGES not in model.loaded.card.all_lacks


def test_texts_with_images_are_those_of_generate(model: Model) -> None:
    """In one batch with text alone, which shares no image with them."""
    cases = [(SIZES[:1], 12), (SIZES[1:], 7), (SIZES, 9)]
    jobs = [
        seeing(model.prompt(*sizes), [picture(at, *size) for at, size in enumerate(sizes)], tokens)
        for sizes, tokens in cases
    ]
    alone = greedy(model.prompt(text=13), 10)
    events = finish(model.loaded, [*jobs, alone])
    for job in jobs:
        expected = model.generated(job.token_ids, job.images, job.sampling.max_tokens)
        found = scored(job, events)
        assert [one for one, _ in found] == [one for one, _ in expected]
        assert [each for _, each in found] == pytest.approx([e for _, e in expected], abs=1e-3)
    again = greedy(model.prompt(text=13), 10)
    assert ids_of(alone, events) == ids_of(again, finish(model.loaded, [again]))
    stats = engine_of(model.loaded).stats()
    assert (stats.kv_blocks_used, stats.running) == (0, 0)
    texts = engine_of(model.loaded)._backend._texts  # type: ignore[attr-defined]
    assert isinstance(texts, PaddedBatch)


def test_what_an_image_shows_decides_the_text(model: Model) -> None:
    ids = model.prompt(SIZES[0])
    jobs = [seeing(ids, [picture(seed)]) for seed in (1, 2, 1)]
    first, other, again = (scored(job, finish(model.loaded, [job]))[0][1] for job in jobs)
    assert first == pytest.approx(again, abs=1e-6) and abs(first - other) > 1e-3


def test_a_text_goes_on_elsewhere_with_its_images(model: Model) -> None:
    """Even one that has the image's own token in what was generated."""
    ids, files = model.prompt(SIZES[0]), [picture(3)]
    whole = seeing(ids, files, 12)
    expected = ids_of(whole, finish(model.loaded, [whole]))
    rest = seeing([*ids, *expected[:5]], files, 7, begun=5)
    assert ids_of(rest, finish(model.loaded, [rest])) == expected[5:]
    odd = seeing([*ids, model.vision.token_id, 4], files, 3, begun=2)
    assert end_of(odd, finish(model.loaded, [odd])).reason is FinishReason.LENGTH


def bomb(side: int) -> bytes:
    """A PNG of some hundred bytes that says it is ``side`` pixels wide and high."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        total = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", total)

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"no image at all", "image 1 cannot be decoded"),
        (picture(1)[:200], "image 1 cannot be decoded"),
        (bomb(9000), f"image 1 has more than {MAX_PIXELS} pixels"),
    ],
)
def test_what_cannot_be_decoded_ends_its_own_job(model: Model, file: bytes, why: str) -> None:
    ids = model.prompt(SIZES[0])
    bad, good = seeing(ids, [file]), seeing(ids, [picture(1)], 3)
    events = finish(model.loaded, [bad, good])
    end = end_of(bad, events)
    assert (end.code, why in end.message) == (Code.INVALID_REQUEST, True)
    assert end_of(good, events).completion_tokens == 3


def test_a_prompt_made_for_another_model_is_refused(model: Model) -> None:
    ids = model.prompt(SIZES[0])
    short, none = seeing(ids[4:], [picture(1)]), seeing([3, 4], [picture(1)])
    events = finish(model.loaded, [short, none])
    assert "made for another model" in end_of(short, events).message
    assert "no tokens for them" in end_of(none, events).message
    assert end_of(short, events).code is end_of(none, events).code is Code.INVALID_REQUEST


def test_a_job_is_cancelled_while_its_images_are_prepared(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = engine_of(model.loaded), threading.Event()
    backend: Any = engine._backend
    read = backend._images.read
    monkeypatch.setattr(backend._images, "read", lambda *a: gate.wait(60) and read(*a))
    slow, text = seeing(model.prompt(SIZES[0]), [picture(1)]), greedy(model.prompt(), 4)
    for job in (slow, text):
        engine.submit(job)
    events: list[Event] = []
    while not any(isinstance(event, JobFinished) and event.job is text for event in events):
        events += engine.step()  # text alone waits for nobody's images
    engine.cancel(slow, AbortCause.CANCEL)
    events += engine.step()
    gate.set()
    assert end_of(slow, events).code is Code.CANCELLED
    assert end_of(text, events).completion_tokens == 4


def test_a_model_whose_images_cannot_be_read_serves_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_vision_checkpoint(tmp_path, "llava")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setitem(__import__("sys").modules, "PIL", None)
        blind = load(path)
    assert blind.card.vision is None and Feature.IMAGES in blind.card.all_lacks
    assert "pip install 'pillow" in caplog.text
    job = greedy([5, 6, 7], 3)
    assert end_of(job, finish(blind, [job])).completion_tokens == 3
    blind.engine.stop()
