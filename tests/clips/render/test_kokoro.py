"""Speech by Kokoro, with random weights (``tidegate[slot-kokoro]``)."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clips.plan.recipe import Recipe, RecipeError, Voice
from clips.render.stages.kokoro import KokoroSpeech
from worker.errors import BrokenCheckpoint, LoadError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of libraries that kokoro imports
    pytest.mark.skipif(
        importlib.util.find_spec("kokoro") is None, reason="speech by Kokoro: tidegate[slot-kokoro]"
    ),
]

CPU = torch.device("cpu")
TEXT = "Hi. You too! Bye."


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KokoroSpeech]:
    from tests.clips.render.checkpoints import save_kokoro

    folder = save_kokoro(tmp_path_factory.mktemp("kokoro") / "82M")
    yield KokoroSpeech.load(CPU, str(folder))
    (folder / "kokoro-v1_0.pth").unlink()  # 200 MB


def said(speech: KokoroSpeech, recipe: Recipe, seconds: float = 60) -> tuple[int, list[float]]:
    audio, shares = torch.full((int(24_000 * seconds),), 9.0), []
    with torch.inference_mode():
        count = speech.render(recipe, audio, shares.append)
    assert bool((audio[count:] == 9.0).all())
    if count:
        assert float(audio[:count].abs().max()) <= 1.0 and float(audio[:count].std()) > 0
    return count, shares


def test_it_speaks_sentence_by_sentence(speech: KokoroSpeech) -> None:
    count, shares = said(speech, Recipe("1.0", TEXT))
    assert count > 24_000 / 10 and count % 600 == 0  # frames of 25 ms
    assert shares == [0.0, 1 / 3, 2 / 3, 1.0]
    assert said(speech, Recipe("1.0", f"{TEXT} {TEXT}"))[0] > 1.5 * count


def test_what_does_not_fit_is_left_out(speech: KokoroSpeech) -> None:
    assert said(speech, Recipe("1.0", TEXT * 2), seconds=0.25)[0] == 6_000
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        speech.render(Recipe("1.0", TEXT), torch.zeros(24_000), interrupt_later)


def interrupt_later(done: float) -> None:
    if done > 0:
        raise KeyboardInterrupt


def test_voices_speak_their_language_at_a_rate(speech: KokoroSpeech) -> None:
    bonjour = "Bonjour."
    slow = said(speech, Recipe("1.0", bonjour, Voice("ff_siwis", rate=0.5)))[0]
    assert slow > said(speech, Recipe("1.0", bonjour, Voice("ff_siwis", rate=2.0)))[0]
    for name in ("af_nobody", "zf_xiaobei", "../af_heart", "en-us"):
        with pytest.raises(RecipeError, match=r"voice\.name.*af_heart, ff_siwis are some"):
            said(speech, Recipe("1.0", "Hi", Voice(name)))
    with pytest.raises(RecipeError, match=r"voice\.pitch"):
        said(speech, Recipe("1.0", "Hi", Voice(pitch=1.5)))


def test_odd_texts_do_it_no_harm(speech: KokoroSpeech) -> None:
    assert said(speech, Recipe("1.0", "\x00\x1b"))[0] == 0
    for text in ("U.S." * 250, "\ud800 a", "日本"):
        said(speech, Recipe("1.0", text), seconds=0.1)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="kokoro of TIDEGATE_SLOT__FOLDERS is not set"):
        KokoroSpeech.load(CPU, "")
    with pytest.raises(BrokenCheckpoint, match=r"config\.json, kokoro-v1_0\.pth, voices/af_heart"):
        KokoroSpeech.load(CPU, str(tmp_path))
