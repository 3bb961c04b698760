"""A voice is asked for no words that it could only spell out."""

import pytest
import torch

from clips.plan.plan import SAMPLE_RATE
from clips.plan.recipe import RecipeError, read_recipe
from clips.render.stages.scripts import require_sayable


@pytest.mark.parametrize(
    ("text", "language"),
    [
        pytest.param("Good morning, naïve café. ﬁne x² №5 ½", "en-us", id="english"),
        pytest.param("The number π, and an α particle in 漢.", "en", id="letters_by_name"),
        pytest.param("नमस्ते and 안녕하세요", "en", id="said_in_their_own_language"),
        pytest.param("こんにちは、コンピューター。", "ja", id="kana"),
        pytest.param("你好，世界", "cmn", id="chinese"),
        pytest.param("Доброе утро", "ru", id="russian"),
        pytest.param("Добро јутро, dobro jutro", "sr", id="serbian_in_either"),
        pytest.param("😀 — 123 ★ … ！", "en", id="signs_alone"),
    ],
)
def test_what_a_voice_says(text: str, language: str) -> None:
    require_sayable(text, language, language)


@pytest.mark.parametrize(
    ("text", "language", "word", "voices"),
    [
        pytest.param(
            "Say 東京タワー and こんにちは.", "en", "東京タワー", "voice.name: ja)", id="japanese"
        ),
        pytest.param("你好", "en-us", "你好", "voice.name: cmn or yue)", id="chinese"),
        pytest.param(
            "東京へ", "ja", "東京へ", "letter by letter: write it", id="kanji_in_japanese"
        ),
        pytest.param("Say Москва now", "en", "Москва", "voice.name: ru or uk or bg)", id="russian"),
        pytest.param("Καλημέρα", "de", "Καλημέρα", "voice.name: el or grc)", id="greek"),
        pytest.param("ｶﾞｲﾄﾞ", "en", "ガイド", "voice.name: ja)", id="half_width"),
        pytest.param("ⴰⵣⵓⵍ", "en", "ⴰⵣⵓⵍ", "letter by letter: write it", id="nobody"),
    ],
)
def test_what_it_would_spell_out(text: str, language: str, word: str, voices: str) -> None:
    with pytest.raises(RecipeError) as refused:
        require_sayable(text, language, language)
    assert refused.value.field == "text"
    message = str(refused.value)
    assert f"the voice {language} would spell out {word}, " in message and voices in message


def test_espeak_refuses_it() -> None:
    pytest.importorskip("espeakng_loader", reason="speech by eSpeak NG: tidegate[slot]")
    from clips.render.stages.espeak import EspeakSpeech

    speech = EspeakSpeech()
    audio = torch.zeros(4 * SAMPLE_RATE)

    def say(voice: str) -> int:
        recipe = {"schema": "1.0", "text": "こんにちは", "voice": {"name": voice}}
        return speech.render(read_recipe(recipe), audio, lambda done: None)

    try:
        for voice in ("", "en-us", "gmw/en+f3"):
            with pytest.raises(RecipeError, match="こんにちは"):
                say(voice)
        for voice in ("ja", "Japanese"):
            assert 0 < say(voice) < 2 * SAMPLE_RATE
    finally:
        speech.close()
