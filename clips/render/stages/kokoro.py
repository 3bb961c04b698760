"""Speech by Kokoro (82 million weights) through the kokoro package, from a local folder.

Each sentence: text → phonemes (misaki) → sound, with a step before it. English phonemes
come from misaki's dictionary where spaCy's model for it is installed, and from eSpeak NG (GPL-3.0,
a dependency of misaki) otherwise, like those of other languages.
"""

import importlib.util
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from clips.plan.recipe import Recipe, RecipeError
from clips.render.memory import Resident, media_log
from clips.render.stages.base import Step
from clips.render.stages.checkpoint import loading, need_all, not_installed, open_folder, resident
from clips.render.stages.espeak import pieces_of

SETTING = "kokoro of TIDEGATE_SLOT__FOLDERS"
DEFAULT_VOICE = "af_heart"
LANGUAGES: Mapping[str, str] = {
    "a": "en-us",
    "b": "en-gb",
    "e": "es",
    "f": "fr-fr",
    "h": "hi",
    "i": "it",
    "p": "pt-br",
}
"""Languages by the first letter of a voice: those that need nothing beyond eSpeak NG."""
_WEIGHTS = "kokoro-v1_0.pth"
_ENGLISH = "en_core_web_sm"
_VOICE = re.compile(r"[a-z]{2}_[a-z0-9]{1,30}")
_MAX_PHONEMES = 510

Phonemes = Callable[[str], str]


class KokoroSpeech:
    """A ``SpeechProvider``."""

    name = "kokoro"

    def __init__(self, model: Any, folder: Path, device: torch.device) -> None:
        """``model``: a ``KModel``; ``folder`` contains ``voices``."""
        self._model = model.eval().to(device)
        self._folder = folder
        self._device = device
        self._voices: dict[str, torch.Tensor] = {}

    @classmethod
    def load(cls, device: torch.device, folder: str) -> "KokoroSpeech":
        """Load the weights in ``folder``. Raises ``LoadError``."""
        try:
            from kokoro import KModel
        except ImportError as error:
            raise not_installed("kokoro", "slot-kokoro", error) from None
        files = ("config.json", _WEIGHTS, f"voices/{DEFAULT_VOICE}.pt")
        path = open_folder(folder, SETTING, "Kokoro-82M", files)
        with loading(path):
            model = KModel(
                repo_id="hexgrad/Kokoro-82M",
                config=str(path / "config.json"),
                model=str(path / _WEIGHTS),
            )
            # The library silently accepts a file whose weights have other names.
            stored = torch.load(path / _WEIGHTS, map_location="cpu", weights_only=True, mmap=True)
            names = {
                f"{part}.{key.removeprefix('module.')}"
                for part, state in stored.items()
                for key in state
            }
            need_all(path / _WEIGHTS, {name for name, _ in model.named_parameters()} - names)
            speech = cls(model.requires_grad_(False), path, device)
            _phonemes(LANGUAGES[DEFAULT_VOICE[0]])
        return speech

    def residents(self) -> Sequence[Resident]:
        return [resident("kokoro", [self._model], "fp32")]

    def close(self) -> None:
        self._voices.clear()
        _phonemes.cache_clear()
        self._model.to("meta")

    def render(self, recipe: Recipe, audio: torch.Tensor, step: Step) -> int:
        if recipe.voice.pitch != 1.0:
            raise RecipeError(
                "voice.pitch", "kokoro's voices have a pitch of their own: leave it out, or at 1"
            )
        name = recipe.voice.name or DEFAULT_VOICE
        voice, phonemes_of = self._voice(name), _phonemes(LANGUAGES[name[0]])
        pieces = list(pieces_of(recipe.text))
        made = 0
        for number, piece in enumerate(pieces):
            step(number / len(pieces))
            for tokens in self._tokens(phonemes_of(piece)):
                spoken = self._spoken(tokens, voice, recipe.voice.rate)
                count = min(spoken.numel(), audio.numel() - made)
                audio[made : made + count].copy_(spoken[:count].clamp_(-1, 1))
                made += count
            if made == audio.numel():
                break
        step(1.0)
        return made

    def _tokens(self, phonemes: str) -> list[list[int]]:
        """Split phonemes into lists of tokens that fit the model; unknown ones are left out."""
        known = [self._model.vocab[each] for each in phonemes if each in self._model.vocab]
        most = min(_MAX_PHONEMES, self._model.context_length - 2)
        return [known[first : first + most] for first in range(0, len(known), most)]

    def _spoken(self, tokens: list[int], voice: torch.Tensor, rate: float) -> torch.Tensor:
        """Speak ``tokens``: ``[samples]`` float32 at 24 kHz."""
        ids = torch.tensor([[0, *tokens, 0]], device=self._device)
        # A voice has a style for each number of phonemes.
        sound, _ = self._model.forward_with_tokens(ids, voice[len(tokens) - 1], rate)
        return sound.float().flatten()  # type: ignore[no-any-return]

    def _voice(self, name: str) -> torch.Tensor:
        """The styles ``[510, 1, 256]`` of a voice. Raises ``RecipeError`` for an unknown one."""
        if name not in self._voices:
            voices = self._folder / "voices"
            file = voices / f"{name}.pt"
            if not _VOICE.fullmatch(name) or name[0] not in LANGUAGES or not file.is_file():
                there = sorted(path.stem for path in voices.glob("*.pt"))
                known = [each for each in there if each[0] in LANGUAGES][:4]
                raise RecipeError(
                    "voice.name", f"kokoro has no voice {name!r} here; {', '.join(known)} are some"
                )
            self._voices[name] = torch.load(file, map_location=self._device, weights_only=True)
        return self._voices[name]


@cache
def _phonemes(language: str) -> Phonemes:
    from misaki import espeak

    if not language.startswith("en"):
        words: Any = espeak.EspeakG2P(language=language)
        _hush()
        return lambda text: str(words(text)[0])
    is_british = language == "en-gb"
    unknown: Any = espeak.EspeakFallback(british=is_british)
    _hush()
    # Without spaCy's model misaki is not used, as it would download one.
    if importlib.util.find_spec(_ENGLISH) is None:
        media_log.warning(
            "kokoro's English comes from eSpeak NG: %s is not installed (python -m spacy download"
            " %s), with which it is said better",
            _ENGLISH,
            _ENGLISH,
        )
        return lambda text: str(unknown(SimpleNamespace(text=text))[0] or "")
    from misaki import en

    english: Any = en.G2P(british=is_british, fallback=unknown, unk="")
    return lambda text: str(english(text)[0])


def _hush() -> None:
    """Silence phonemizer's warnings about sentences whose words eSpeak counts differently. Needed
    after making each of its backends, which reset its log level."""
    logging.getLogger("phonemizer").setLevel(logging.ERROR)
