"""Speech by eSpeak NG: formant synthesis, no weights, some hundred times faster than real time.

``espeakng-loader`` brings the library (GPL-3.0, like its data: an extra that nobody gets unasked).
It has one state per process, and this provider runs on one thread.
"""

import ctypes
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from worker.errors import LoadError
from worker.media.errors import RecipeError
from worker.media.memory import Resident
from worker.media.plan import SAMPLE_RATE
from worker.media.recipe import Recipe
from worker.media.stages.base import Step

_RETRIEVAL = 1
_UTF8 = 1
_PUNCTUATION_END = 0x1000
_RATE, _PITCH = 1, 3
_WORDS_PER_MINUTE = 165
_MIDDLE_PITCH = 50
_CHUNK_MS = 100
_DEFAULT_VOICE = "en"
_NORMAL_PEAK = 0.9
_MOST_CHARACTERS = 100
"""Of text that eSpeak gets at once: it writes beyond its buffers where a clause has too many parts
("U.S." 250 times), and takes the process along."""
_VOICE = re.compile(r"[A-Za-z0-9_-]{1,20}(/[A-Za-z0-9_-]{1,20})?(\+[A-Za-z0-9_-]{1,20})?")
"""A longer name of a variant is written beyond its buffer too."""
_SENTENCE_END = re.compile(r"(?<=[.!?;:\n])\s+")
_SILENT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
"""Control characters, of which the first would end the text, and halves of surrogate pairs."""

_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


class EspeakSpeech:
    """``SpeechProvider``."""

    name = "espeak"

    def __init__(self) -> None:
        """Raises ``LoadError`` where the library is not installed."""
        try:
            import espeakng_loader
        except ImportError:
            raise LoadError(
                "the speech provider espeak needs espeakng-loader: pip install 'tidegate[slot]'"
            ) from None
        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        data = str(espeakng_loader.get_data_path()).encode()
        self._rate = self._library.espeak_Initialize(_RETRIEVAL, _CHUNK_MS, data, 0)
        if self._rate <= 0:
            raise LoadError("eSpeak NG cannot read its data")

    def residents(self) -> Sequence[Resident]:
        return ()

    def close(self) -> None:
        self._library.espeak_Terminate()

    def render(self, recipe: Recipe, audio: torch.Tensor, step: Step) -> int:
        voice = recipe.voice.name or _DEFAULT_VOICE
        is_name = _VOICE.fullmatch(voice) is not None
        if not is_name or self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise RecipeError(
                "voice.name",
                f"eSpeak NG has no voice {voice!r}; en, en-us, de and fr-fr are some",
            )
        rate = round(_WORDS_PER_MINUTE * recipe.voice.rate)
        pitch = min(99, round(_MIDDLE_PITCH * recipe.voice.pitch))
        self._library.espeak_SetParameter(_RATE, rate, 0)
        self._library.espeak_SetParameter(_PITCH, pitch, 0)
        room = int(audio.numel() * self._rate / SAMPLE_RATE) + 1
        chunks = self._synthesize(recipe.text, room, step)
        if not chunks:
            return 0
        spoken = torch.from_numpy(np.concatenate(chunks)[:room])
        return _resample(spoken, self._rate, audio)

    def _synthesize(self, text: str, room: int, step: Step) -> list[np.ndarray[Any, Any]]:
        """Chunks of samples at eSpeak's own rate, ``room`` of them or a few more."""
        chunks: list[np.ndarray[Any, Any]] = []
        failure: list[BaseException] = []
        made = 0

        def take(samples: Any, count: int, _events: Any) -> int:
            nonlocal made
            if count > 0:
                chunk = np.ctypeslib.as_array(samples, (count,)).astype(np.float32) / 32768
                chunks.append(chunk)
                made += count
            try:
                step(min(1.0, made / room))
            except BaseException as error:  # C would lose it
                failure.append(error)
                return 1
            return int(made >= room)

        callback = _Callback(take)
        self._library.espeak_SetSynthCallback(callback)
        for piece in pieces_of(text):
            data = piece.encode()
            self._library.espeak_Synth(
                ctypes.c_char_p(data),
                ctypes.c_size_t(len(data) + 1),
                *(0, 0, 0, _UTF8 | _PUNCTUATION_END, None, None),
            )
            self._library.espeak_Synchronize()
            if failure:
                raise failure[0]
            if made >= room:
                break
        return chunks


def pieces_of(text: str) -> Iterator[str]:
    """Sentences, and parts of those that are longer than eSpeak can be trusted with: to the last
    blank where there is one."""
    for sentence in _SENTENCE_END.split(_SILENT.sub(" ", text).strip()):
        left = sentence
        while len(left) > _MOST_CHARACTERS:
            end = left.rfind(" ", 1, _MOST_CHARACTERS + 1)
            end = end if end > 0 else _MOST_CHARACTERS
            yield left[:end]
            left = left[end:].lstrip()
        if left:
            yield left


def _resample(spoken: torch.Tensor, rate: int, audio: torch.Tensor) -> int:
    """``spoken`` at ``rate`` into ``audio`` at ``SAMPLE_RATE``, as loud as it may be."""
    # By its spectrum: between samples joined by lines, 9 kHz would be heard at 11 too.
    there = max(1, int(spoken.numel() * SAMPLE_RATE / rate))
    count = min(audio.numel(), there)
    spectrum = torch.fft.rfft(spoken)
    stretched = torch.fft.irfft(spectrum, n=there)[:count]
    peak = float(stretched.abs().max()) if count else 0.0
    audio[:count].copy_(stretched * (_NORMAL_PEAK / peak) if peak > 0 else stretched)
    return count
