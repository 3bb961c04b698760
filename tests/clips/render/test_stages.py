"""The providers that need no weights: what they make is looked at, not only that they make it."""

import io
import wave
from itertools import pairwise
from typing import Any

import pytest
import torch

from clips.plan.plan import SAMPLE_RATE, ClipPlan
from clips.plan.recipe import read_recipe
from clips.render import encode
from clips.render.clip import judge, keyframes_of
from clips.render.settings import RenderSettings
from clips.render.stages import face
from clips.render.stages.procedural import ProceduralPortrait, draw
from clips.render.stages.providers import load_providers
from clips.render.stages.warp import WarpVideo
from tests.clips.render.fakes import CPU
from tests.support.cases import for_each
from tests.support.processes import python
from worker.errors import LoadError

SIZE = 96
FPS = 12


def no_step(done: float) -> None:
    assert 0 <= done <= 1


def portrait(prompt: str, seed: int = 0, size: int = SIZE) -> torch.Tensor:
    recipe = read_recipe(
        {"schema": "1.0", "text": "Hi", "portrait": {"prompt": prompt, "seed": seed}}
    )
    actor = torch.zeros(3, size, size)
    ProceduralPortrait().render(recipe, actor, no_step)
    return actor


def at(picture: torch.Tensor, x: float, y: float) -> torch.Tensor:
    """The colour there, 0 to 1."""
    size = picture.shape[-1]
    column, row = (int((v + 1) / 2 * size) for v in (x, y))
    colour = picture[:, row, column].float()
    return colour / 255 if picture.dtype == torch.uint8 else colour


def test_the_same_prompt_and_seed_are_the_same_face() -> None:
    assert torch.equal(portrait("a host", 3), portrait("a host", 3))
    faces = {portrait("a host", seed).numpy().tobytes() for seed in range(8)}
    assert len(faces) > 3


@for_each(
    ("prompt", "hair", "skin"),
    [
        ("dark skin and red hair", "red", "dark"),
        ("a blonde, pale", "blond", "pale"),
        ("Gray Hair", "grey", None),
        ("bald man", "", None),
    ],
)
def test_prompts_are_read(prompt: str, hair: str, skin: str | None) -> None:
    look = face.look_of(prompt, 1)
    assert look.hair == hair and (skin is None or look.skin == skin)


def around(video: torch.Tensor, x: float, y: float, wide: float, high: float) -> torch.Tensor:
    """``[frames, 3, …]``, 0 to 1, of a part of each frame."""
    left, right, top, bottom = (
        int((v + 1) / 2 * video.shape[-1]) for v in (x - wide, x + wide, y - high, y + high)
    )
    return video[:, :, top:bottom, left:right].float() / 255


def loud_and_quiet() -> torch.Tensor:
    """A second of silence, a second of sound, and so on twice."""
    tone = 0.5 * torch.sin(torch.arange(SAMPLE_RATE) * 0.1)
    return torch.cat([torch.zeros(SAMPLE_RATE), tone] * 2)


def test_frames_move_as_a_speaking_face_does() -> None:
    actor, audio = portrait("pale skin, brown hair, studio"), loud_and_quiet()
    plan = ClipPlan(4.0, FPS, SIZE, has_check=False)
    video = torch.zeros(plan.frames, 3, SIZE, SIZE, dtype=torch.uint8)
    done: list[float] = []
    WarpVideo().render(plan, actor, audio, video, done.append)
    assert done == sorted(done) and done[-1] == 1.0 and len(done) > 4
    brightness = video.float().mean((1, 2, 3))
    assert float(brightness.min()) > 60, "no frame is black"
    x, y = face.MOUTH
    dark = (around(video, x, y + 0.1, 0.12, 0.12) < 0.4).all(1).float().mean((1, 2))
    quiet, loud = dark[2 : FPS - 2].mean(), dark[FPS + 2 : 2 * FPS - 2].mean()
    assert float(loud) > float(quiet) + 0.1, "an open mouth is dark inside"
    assert any(not torch.equal(a, b) for a, b in pairwise(video[:4]))


def test_sound_survives_the_file() -> None:
    audio = loud_and_quiet()
    with wave.open(io.BytesIO(encode.wav(audio))) as file:
        assert (file.getframerate(), file.getnframes()) == (SAMPLE_RATE, audio.numel())
        samples = torch.frombuffer(bytearray(file.readframes(audio.numel())), dtype=torch.int16)
    assert torch.allclose(samples / 32767, audio, atol=1e-3)


def test_a_clip_survives_the_file() -> None:
    av: Any = pytest.importorskip("av", reason="clips are encoded by PyAV: tidegate[slot]")
    video = torch.zeros(2 * FPS, 3, 64, 64, dtype=torch.uint8)
    video[FPS:] = 200
    data = encode.mp4(video, loud_and_quiet()[: 2 * SAMPLE_RATE], FPS)
    with av.open(io.BytesIO(data)) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    with av.open(io.BytesIO(data)) as file:
        sound = sum(frame.samples for frame in file.decode(audio=0))
        stream = file.streams.video[0]
        assert (stream.codec_context.name, float(stream.average_rate)) == ("h264", FPS)
    assert len(frames) == 2 * FPS
    assert frames[2].mean() < 30 and frames[-2].mean() > 170
    assert abs(sound - 2 * SAMPLE_RATE) < 4096, "AAC fills its first and last frame up"


def test_a_portrait_survives_the_file() -> None:
    av: Any = pytest.importorskip("av", reason="pictures are encoded by PyAV: tidegate[slot]")
    picture = portrait("night", size=64)
    with av.open(io.BytesIO(encode.png(picture)), format="png_pipe") as file:
        read = next(file.decode(video=0)).to_ndarray(format="rgb24")
    assert torch.allclose(torch.from_numpy(read).permute(2, 0, 1) / 255, picture, atol=3e-3)


def test_espeak_says_it_in_time() -> None:
    pytest.importorskip("espeakng_loader", reason="speech by eSpeak NG: tidegate[slot]")
    from clips.render.stages.espeak import EspeakSpeech

    speech = EspeakSpeech()
    try:
        audio = torch.zeros(6 * SAMPLE_RATE)
        slow, fast = (
            speech.render(
                read_recipe({"schema": "1.0", "text": "Good morning, all.", "voice": {"rate": r}}),
                audio,
                no_step,
            )
            for r in (0.7, 1.8)
        )
        assert 0.3 * SAMPLE_RATE < fast < 0.8 * slow
        assert 0.5 < float(audio[:fast].abs().max()) <= 1.0
        recipe = read_recipe({"schema": "1.0", "text": "Good morning. " * 20})
        assert speech.render(recipe, audio[:SAMPLE_RATE], no_step) == SAMPLE_RATE

        with pytest.raises(ValueError, match="no voice 'nobody'"):
            speech.render(
                read_recipe({"schema": "1.0", "text": "Hi", "voice": {"name": "nobody"}}),
                audio,
                no_step,
            )
    finally:
        speech.close()


def test_the_check_tells_faces_apart() -> None:
    from clips.render.stages.tiny_clip import TinyClipCheck

    check = TinyClipCheck(torch.device("cpu"))
    look = face.Look("red", "dark", "forest", has_glasses=True, has_beard=False)
    actor = torch.empty(3, SIZE, SIZE)
    draw(look, actor)
    plan = ClipPlan(2.0, FPS, SIZE, has_check=True)
    video = torch.zeros(plan.frames, 3, SIZE, SIZE, dtype=torch.uint8)
    WarpVideo().render(plan, actor, loud_and_quiet(), video, no_step)
    frames = video[keyframes_of(len(video))]

    def passes(prompt: str) -> bool:
        with torch.inference_mode():
            return judge(check.score(prompt, frames, no_step)).passed

    for right in ("a friendly host", "red hair", "a woman, red hair, with glasses", "dark skin"):
        assert passes(right), right
    for wrong in ("blond hair", "night background", "pale skin, blue hair"):
        assert not passes(wrong), wrong


HOSTILE = """
import sys
import torch
from worker.errors import RequestError
from clips.plan.recipe import Recipe, Voice
from clips.render.stages.espeak import EspeakSpeech

speech, audio = EspeakSpeech(), torch.zeros(96_000)
for text in ("U.S." * 250, "I." * 500, "a." * 500, "a\\0b\\x1b", "\\ud800"):
    speech.render(Recipe("1.0", text), audio, lambda done: None)
for name in ("en+" + "b" * 40, "x" * 64, "en\\n", "/etc/passwd"):
    try:
        speech.render(Recipe("1.0", "Hi", Voice(name)), audio, lambda done: None)
    except RequestError as error:
        assert "recipe.voice.name" in str(error)
    else:
        sys.exit(name)
"""


@pytest.mark.slow
def test_no_text_or_voice_takes_the_process_along() -> None:
    pytest.importorskip("espeakng_loader", reason="speech by eSpeak NG: tidegate[slot]")
    python("-c", HOSTILE)


@pytest.mark.parametrize("samples", [1, 1023, 22_000, 24_000])
def test_sound_may_end_anywhere_in_the_last_frame(samples: int) -> None:
    pytest.importorskip("av", reason="clips are encoded by PyAV: tidegate[slot]")
    video = torch.zeros(12, 3, 64, 64, dtype=torch.uint8)
    assert encode.mp4(video, loud_and_quiet()[:samples], FPS)


def test_an_unknown_name_is_a_load_error() -> None:
    with pytest.raises(
        LoadError, match="TIDEGATE_SLOT__PORTRAIT: no provider 'x'; available: proc"
    ):
        load_providers(CPU, RenderSettings(portrait="x"))
