"""Speech by eSpeak NG: formant synthesis, no weights, some hundred times faster than real time.

``espeakng-loader`` contains the library (GPL-3.0, like its data: installed only on request). It is
C code that reads untrusted text, so it runs in its own process (``espeak_child``), which is killed
when a stage must stop, and restarted.
"""

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from clips.plan.plan import SAMPLE_RATE
from clips.plan.recipe import Recipe, RecipeError
from clips.render.memory import media_log
from clips.render.stages import espeak_child
from clips.render.stages.base import SpeechProvider, Step
from worker.errors import LoadError
from worker.extras import pip_install

_WORDS_PER_MINUTE = 165
_MIDDLE_PITCH = 50
_DEFAULT_VOICE = "en"
_NORMAL_PEAK = 0.9
_START_S = 10.0
_LOOK_MS = 20
"""Milliseconds between checks whether a stage must stop, even while eSpeak computes."""
_MAX_CHARACTERS = 100
"""Most characters that eSpeak gets at once: it writes beyond its buffers where a clause has too
many parts ("U.S." 250 times)."""
_VOICE = re.compile(r"[A-Za-z0-9_-]{1,20}(/[A-Za-z0-9_-]{1,20})?(\+[A-Za-z0-9_-]{1,20})?")
"""Names of voices that are safe: eSpeak writes longer names of variants beyond its buffer."""
_SENTENCE_END = re.compile(r"(?<=[.!?;:\n])\s+")
_SILENT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
"""Control characters, the first of which (NUL) would end the text, and lone surrogates."""

Look = Callable[[], None]


class EspeakSpeech(SpeechProvider):
    name = "espeak"

    def __init__(self, child: Path = Path(espeak_child.__file__)) -> None:
        """``child``: the program of the process. Raises ``LoadError`` where eSpeak NG is not
        installed or does not start."""
        try:
            import espeakng_loader
        except ImportError:
            raise LoadError(
                f"the speech provider espeak needs espeakng-loader: {pip_install('slot')}"
            ) from None
        self._command = [
            *(_python(), "-I", "-S", str(child)),
            *(espeakng_loader.get_library_path(), str(espeakng_loader.get_data_path())),
        ]
        self._process = _Espeak(self._command)
        end = time.monotonic() + _START_S

        def look() -> None:
            if time.monotonic() > end:
                raise TimeoutError(f"it did not answer in {_START_S:g} s")

        try:
            self._process.rate(look)
        except (OSError, TimeoutError) as error:
            self._process.kill()
            raise LoadError(f"eSpeak NG cannot be started: {error}") from None

    def close(self) -> None:
        self._process.kill()

    def render(self, recipe: Recipe, audio: torch.Tensor, step: Step) -> int:
        voice = recipe.voice.name or _DEFAULT_VOICE
        rate, chunks = self._synthesize(voice, recipe, audio.numel(), step)
        if not chunks:
            return 0
        spoken = np.frombuffer(chunks, np.int16).astype(np.float32) / 32768
        return _resample(torch.from_numpy(spoken), rate, audio)

    def _synthesize(
        self, voice: str, recipe: Recipe, samples: int, step: Step
    ) -> tuple[int, bytearray]:
        """eSpeak's own rate in Hz, and int16 samples at it, ``samples`` at ours at most."""
        if _VOICE.fullmatch(voice) is None:
            raise _no_voice(voice)
        try:
            rate = self._process.rate(lambda: step(0.0))
            room = int(samples * rate / SAMPLE_RATE) + 1
            self._process.ask(
                {
                    "voice": voice,
                    "rate": round(_WORDS_PER_MINUTE * recipe.voice.rate),
                    "pitch": min(99, round(_MIDDLE_PITCH * recipe.voice.pitch)),
                    "room": room,
                    "pieces": list(pieces_of(recipe.text)),
                }
            )
            spoken = bytearray()

            def look() -> None:
                step(min(1.0, len(spoken) / 2 / room))

            while count := self._process.number(look):
                if count == espeak_child.NO_VOICE:
                    raise _no_voice(voice)
                spoken += self._process.take(2 * count, look)
                look()
        except RecipeError:
            raise
        except BaseException:
            # The process may hang, and its next output would be taken for the next clip's.
            self._process.kill()
            self._process = _Espeak(self._command)
            raise
        del spoken[2 * room :]
        return rate, spoken


class _Espeak:
    """The eSpeak process, used by one thread. Its methods call ``look`` every ``_LOOK_MS`` while
    there is nothing to read; it raises to end the wait."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        self.pid = self._process.pid
        self._in, self._out = self._process.stdin, self._process.stdout
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._rate = 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        with suppress(OSError):
            self._in.close()

    def rate(self, look: Look) -> int:
        """Sample rate in Hz. Raises ``OSError`` where eSpeak cannot read its data, and what
        ``look`` raises."""
        if not self._rate:
            self._rate = self.number(look)
        if self._rate <= 0:
            raise OSError("eSpeak NG cannot read its data")
        return self._rate

    def ask(self, request: dict[str, object]) -> None:
        # The process gets the niceness of the thread that asks.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0))
        # Less than 64 KB, which a pipe takes at once whether it is read or not.
        self._in.write(json.dumps(request).encode() + b"\n")

    def number(self, look: Look) -> int:
        return int.from_bytes(self.take(4, look), "little", signed=True)

    def take(self, count: int, look: Look) -> bytes:
        """``count`` bytes. Raises ``OSError`` when the process has ended."""
        taken = bytearray()
        while len(taken) < count:
            if not self._poll.poll(_LOOK_MS):
                look()
                continue
            part = os.read(self._out.fileno(), count - len(taken))
            if not part:
                status = self._process.wait()
                media_log.warning("eSpeak NG ended with status %d; it is restarted", status)
                raise OSError(f"eSpeak NG ended with status {status}")
            taken += part
        return bytes(taken)


def pieces_of(text: str) -> Iterator[str]:
    """Split ``text`` into sentences, and those too long for eSpeak at their last blank that fits,
    or anywhere without one."""
    for sentence in _SENTENCE_END.split(_SILENT.sub(" ", text).strip()):
        left = sentence
        while len(left) > _MAX_CHARACTERS:
            end = left.rfind(" ", 1, _MAX_CHARACTERS + 1)
            end = end if end > 0 else _MAX_CHARACTERS
            yield left[:end]
            left = left[end:].lstrip()
        if left:
            yield left


def _python() -> str:
    """Path of a Python interpreter; in Triton's stub ``sys.executable`` may not be one."""
    for path in (sys.executable, shutil.which("python3"), shutil.which("python")):
        if path and Path(path).name.startswith("python"):
            return path
    raise LoadError("eSpeak NG needs its own process, and there is no python3 on the PATH")


def _no_voice(voice: str) -> RecipeError:
    return RecipeError(
        "voice.name", f"eSpeak NG has no voice {voice!r}; en, en-us, de and fr-fr are some"
    )


def _resample(spoken: torch.Tensor, rate: int, audio: torch.Tensor) -> int:
    """Resample ``spoken`` from ``rate`` into ``audio`` at ``SAMPLE_RATE``, scaled to the normal
    peak; returns the number of samples."""
    # Resampled by its spectrum: with linear interpolation 9 kHz would be heard at 11 too.
    there = max(1, int(spoken.numel() * SAMPLE_RATE / rate))
    count = min(audio.numel(), there)
    spectrum = torch.fft.rfft(spoken)
    stretched = torch.fft.irfft(spectrum, n=there)[:count]
    peak = float(stretched.abs().max()) if count else 0.0
    audio[:count].copy_(stretched * (_NORMAL_PEAK / peak) if peak > 0 else stretched)
    return count
