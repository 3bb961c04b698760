"""Images on the real vLLM: a tiny random model of the kind that it reads them with."""

import hashlib
import io
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol import (
    AbortCause,
    Code,
    Feature,
    ImageTokens,
    Sampling,
    Vision,
    block_hashes,
    keyed_by_images,
    prefix_salt,
)
from tests.support import real_vllm
from tests.support.checkpoints import make_vision_checkpoint
from tests.support.engine import end_of, ids_of
from tests.support.lazy import transformers
from tests.support.pictures import bomb, picture
from tests.support.real_vllm import (
    FAR,
    engine_of,
    finish,
    greedy,
    loaded_by_vllm,
    skip_without_vllm,
)
from tests.worker.engines.vllm.test_families import HEADS
from worker.core import Event, Job, JobTokens
from worker.loaded import LoadedEngine

pytestmark = real_vllm.MARKS

SIZES = ((40, 24), (16, 16), (64, 8))
PAGES = {"enforce_eager": "true", "block_size": "32"}


class Model:
    """A model that reads images, compared with the library's own way to run it."""

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
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **processor(images=images, return_tensors="pt"),
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


def seeing(ids: Sequence[int], files: Sequence[bytes], tokens: int = 12) -> Job:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    return Job(ids, sampling, FAR, images=files)


def scored(job: Job, events: list[Event]) -> list[tuple[int, float]]:
    """A job's tokens with their log-probabilities."""
    told = [event for event in events if isinstance(event, JobTokens) and event.job is job]
    return [
        (token, one.logprob)
        for event in told
        for token, one in zip(event.ids, event.logprobs or (), strict=True)
    ]


def skip_without_eyes() -> None:
    skip_without_vllm()
    if find_spec("torchvision") is None:
        pytest.skip(
            "torchvision is not here, without which vLLM imports no model that reads images"
        )


def make_llava(folder: Path) -> Path:
    """A LLaVA with its vision tower's weights named as published ones are, which vLLM expects."""
    path = make_vision_checkpoint(folder, **HEADS)
    weights = load_file(path / "model.safetensors")
    tower = re.compile(r"vision_tower\.(?!vision_model)")
    named = {tower.sub("vision_tower.vision_model.", name): weights[name] for name in weights}
    save_file(named, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    skip_without_eyes()
    path = make_llava(tmp_path_factory.mktemp("llava"))
    with loaded_by_vllm(path, engine_args=PAGES) as loaded:
        yield Model(path, loaded)


def test_texts_with_images_are_those_of_transformers(model: Model) -> None:
    """In the same steps as text alone, and images in one prompt or several."""
    assert Feature.IMAGES not in model.loaded.card.all_lacks
    cases = [(SIZES[:1], 12), (SIZES[1:], 7), (SIZES, 9)]
    jobs = [
        seeing(model.prompt(*sizes), [picture(at, *size) for at, size in enumerate(sizes)], tokens)
        for sizes, tokens in cases
    ]
    alone = greedy(model.prompt(text=13), 10)
    events = finish(engine_of(model.loaded), [*jobs, alone])
    for job in jobs:
        expected = model.generated(job.token_ids, job.images, job.sampling.max_tokens)
        found = scored(job, events)
        assert [one for one, _ in found] == [one for one, _ in expected]
        assert [each for _, each in found] == pytest.approx([e for _, e in expected], abs=1e-3)
    assert end_of(alone, events).completion_tokens == 10
    stats = engine_of(model.loaded).stats()
    assert (stats.kv_blocks_used, stats.running) == (0, 0)


def test_blocks_are_named_by_what_an_image_shows(model: Model) -> None:
    """As orchestrators name them: a prompt is found again with the same image, and with no other;
    nor by another tenant."""
    card, size = model.loaded.card, SIZES[0]
    ids = model.prompt(size, text=60)

    def cached(file: bytes, salt: str = "") -> int:
        job = seeing(ids, [file], 2)
        job.cache_salt = salt
        return end_of(job, finish(engine_of(model.loaded), [job])).cached_tokens

    cat, dog = picture(11, *size), picture(12, *size)
    whole = len(ids) // card.block_tokens * card.block_tokens
    model.loaded.engine.kv_report()
    assert [cached(cat), cached(cat), cached(dog), cached(cat, "tenant")] == [0, whole, 0, 0]
    report = model.loaded.engine.kv_report()
    assert report is not None
    told = set(report.added)
    for file, salt in ((cat, ""), (dog, ""), (cat, "tenant")):
        image = ImageTokens(hashlib.sha256(file).digest(), model.vision.tokens_of(*size))
        keyed = keyed_by_images(ids, model.vision.token_id, [image])
        names = block_hashes(keyed, card.block_tokens, prefix_salt(card.hash_salt, salt))
        assert names and told.issuperset(names)


@pytest.mark.parametrize(
    ("file", "why"),
    [(b"no image at all", "image 1 cannot be decoded"), (bomb(9000), "image 1 has more than")],
    ids=["none", "bomb"],
)
def test_what_cannot_be_decoded_ends_its_own_job(model: Model, file: bytes, why: str) -> None:
    ids = model.prompt(SIZES[0])
    bad, good = seeing(ids, [file]), seeing(ids, [picture(1)], 3)
    short, none = seeing(ids[4:], [picture(1)]), seeing([3, 4], [picture(1)])
    events = finish(engine_of(model.loaded), [bad, good, short, none])
    assert why in end_of(bad, events).message
    assert "tokens" in end_of(short, events).message
    assert "no tokens for them" in end_of(none, events).message
    assert {end_of(one, events).code for one in (bad, short, none)} == {Code.INVALID_REQUEST}
    assert end_of(good, events).completion_tokens == 3


def test_a_job_is_cancelled_while_its_images_are_prepared(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = engine_of(model.loaded), threading.Event()
    backend: Any = engine.backend.core  # type: ignore[attr-defined]
    reader = backend._parts.images
    read = reader.read
    monkeypatch.setattr(reader, "read", lambda job: gate.wait(60) and read(job))
    slow, text = seeing(model.prompt(SIZES[0]), [picture(1)]), greedy(model.prompt(), 4)
    for job in (slow, text):
        engine.submit(job)
    events: list[Event] = []
    while len(ids_of(text, events)) < 4:
        events += engine.step()  # text alone waits for nobody's images
    engine.cancel(slow, AbortCause.CANCEL)
    events += engine.step()
    gate.set()
    events += finish(engine_of(model.loaded), [])
    assert end_of(slow, events).code is Code.CANCELLED and not backend._looking
    assert end_of(text, events).completion_tokens == 4


def test_a_model_whose_images_cannot_be_read_serves_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    skip_without_eyes()
    path = make_llava(tmp_path)
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    job, other = greedy([5, 6, 7], 3), seeing([5, 6, 7], [picture(1)])
    with caplog.at_level(logging.WARNING), loaded_by_vllm(path, engine_args=PAGES) as blind:
        assert blind.card.vision is None and Feature.IMAGES in blind.card.all_lacks
        events = finish(engine_of(blind), [job, other])
    assert "its chat template does not write the token of an image" in caplog.text
    assert end_of(job, events).completion_tokens == 3
    assert "reads no images" in end_of(other, events).message
