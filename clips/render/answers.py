"""Makes the answers to a clip's client: progress, previews, and the clip."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from clips.plan.budgets import Stage
from clips.plan.plan import SAMPLE_RATE
from clips.render import encode
from clips.render.clip import Clip
from clips.render.memory import media_log
from worker.errors import ResponderLost
from worker.service.call import Responder, Tensors, strings

_PROGRESS_S = 0.1
_PREVIEW_S = 0.2


class ProgressAnswers:
    """Passes one clip's progress from its stages' threads to its client, with limited frequency."""

    def __init__(self, loop: asyncio.AbstractEventLoop, responder: Responder) -> None:
        self._loop = loop
        self._responder = responder
        self._next: dict[Stage, float] = {}

    def __call__(self, stage: Stage, done: float) -> None:
        now = time.monotonic()
        if done < 1.0 and now < self._next.get(stage, 0.0):
            return
        self._next[stage] = now + _PROGRESS_S
        self._loop.call_soon_threadsafe(say, self._responder, stage, done, {})


class Previews:
    """Sends small pictures of one clip. A stage's thread only announces one: it is read and encoded
    on ``encoder``, one at a time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, encoder: Executor, responder: Responder
    ) -> None:
        self._loop = loop
        self._encoder = encoder
        self._responder = responder
        self._next = 0.0
        self._latest: Future[None] | None = None

    def __call__(self, stage: Stage, done: float, picture: torch.Tensor) -> None:
        now = time.monotonic()
        if now < self._next or (self._latest is not None and not self._latest.done()):
            return
        self._next = now + _PREVIEW_S
        # The picture is complete once the device has done all that the stage has launched so far.
        drawn = torch.cuda.current_stream().record_event() if picture.is_cuda else None
        self._latest = self._encoder.submit(self._make, stage, done, picture, drawn)

    async def finished(self) -> None:
        """Wait until nothing reads the clip's buffers any more."""
        if self._latest is not None:
            await asyncio.wait([asyncio.wrap_future(self._latest)])

    def _make(
        self, stage: Stage, done: float, picture: torch.Tensor, drawn: "torch.cuda.Event | None"
    ) -> None:
        try:
            if drawn is not None:
                drawn.synchronize()
            data = np.frombuffer(encode.preview(picture), np.uint8)
        except Exception:  # no reason to lose a clip
            media_log.warning("no preview of the %s stage", stage, exc_info=True)
            return
        self._loop.call_soon_threadsafe(say, self._responder, stage, done, {"preview": data})


def say(responder: Responder, stage: Stage, done: float, tensors: Tensors) -> None:
    """Tell the client how far a stage is."""
    event = {"event": "stage", "stage": stage, "percent": round(100 * done)}
    with suppress(ResponderLost):  # its watcher ends the clip
        responder.send({"event": strings(msgspec.json.encode(event)), **tensors})


def facts_of(clip: Clip, *, is_met: bool) -> dict[str, object]:
    """The last answer's facts about a clip, in words and figures."""
    plan = clip.plan
    return {
        "seconds": round(clip.samples / SAMPLE_RATE, 3),
        "frames": clip.frames,
        "fps": plan.fps,
        "size": plan.size,
        "given_up": clip.given_up,
        "check": clip.check,
        "deadline_met": is_met,
        **{f"{stage}_ms": round(clip.stage_ms.get(stage, 0.0), 1) for stage in Stage},
        "total_ms": round(clip.total_ms, 1),
    }


@dataclass(frozen=True, slots=True)
class Outputs:
    """Output tensors by name. ``copied_bytes``: bytes copied from the clip's buffers into encoders
    and off the device, and of all outputs into Triton's shared memory."""

    tensors: Tensors = field(default_factory=dict)
    copied_bytes: int = 0


def outputs_of(names: tuple[str, ...], clip: Clip, go_on: Callable[[], None]) -> Outputs:
    """Make those outputs in ``names`` that the clip has. ``go_on`` is called often, may raise."""
    go_on()
    made: dict[str, NDArray[Any]] = {}
    copied = 0

    def encode_into(name: str, *parts: torch.Tensor, data: bytes) -> None:
        nonlocal copied
        copied += sum(part.nbytes for part in parts)
        made[name] = np.frombuffer(data, np.uint8)

    def give(name: str, tensor: torch.Tensor) -> None:
        nonlocal copied
        copied += tensor.nbytes if tensor.is_cuda else 0
        made[name] = tensor.cpu().numpy()

    if clip.frames and "mp4" in names:
        data = encode.mp4(clip.video, clip.audio, clip.plan.fps, go_on)
        encode_into("mp4", clip.video, clip.audio, data=data)
    if clip.frames and "video" in names:
        give("video", clip.video)
    if clip.samples and "wav" in names:
        encode_into("wav", clip.audio, data=encode.wav(clip.audio))
    if clip.samples and "audio" in names:
        give("audio", clip.audio)
    if clip.portrait_size and "png" in names:
        encode_into("png", clip.portrait, data=encode.png(clip.portrait))
    if clip.portrait_size and "actor" in names:
        give("actor", clip.portrait)
    return Outputs(made, copied + sum(each.nbytes for each in made.values()))
