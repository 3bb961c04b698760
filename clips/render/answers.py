"""Makes the answers to a clip's client: progress, and the clip."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from clips.plan.budgets import ClipStage
from clips.plan.plan import SAMPLE_RATE
from clips.render import encode
from clips.render.clip import Clip
from worker.errors import ResponderLost
from worker.service.call import Responder, Tensors, strings

_PROGRESS_S = 0.1


class ProgressAnswers:
    """Sends one clip's progress from its stages' threads to its client, at a limited rate."""

    def __init__(self, loop: asyncio.AbstractEventLoop, responder: Responder) -> None:
        self._loop = loop
        self._responder = responder
        self._next: dict[ClipStage, float] = {}

    def __call__(self, stage: ClipStage, done: float) -> None:
        now = time.monotonic()
        if done < 1.0 and now < self._next.get(stage, 0.0):
            return
        self._next[stage] = now + _PROGRESS_S
        self._loop.call_soon_threadsafe(say, self._responder, stage, done)


def say(responder: Responder, stage: ClipStage, done: float) -> None:
    """Send a stage's progress to the client."""
    event = {"event": "stage", "stage": stage, "percent": round(100 * done)}
    with suppress(ResponderLost):  # its watcher ends the clip
        responder.send({"event": strings(msgspec.json.encode(event))})


def facts_of(clip: Clip, *, is_met: bool) -> dict[str, object]:
    """The facts about a clip for its last answer."""
    plan = clip.plan
    return {
        "seconds": round(clip.samples / SAMPLE_RATE, 3),
        "frames": clip.frames,
        "fps": plan.fps,
        "size": plan.size,
        "given_up": clip.given_up,
        "check": clip.check,
        "deadline_met": is_met,
        **{f"{stage}_ms": round(clip.stage_ms.get(stage, 0.0), 1) for stage in ClipStage},
        "total_ms": round(clip.total_ms, 1),
    }


@dataclass(frozen=True, slots=True)
class ClipOutputs:
    """Output tensors by name. ``copied_bytes``: bytes copied from the clip's buffers into encoders
    and off the device, and of all outputs into Triton's shared memory."""

    tensors: Tensors = field(default_factory=dict)
    copied_bytes: int = 0


def outputs_of(names: tuple[str, ...], clip: Clip, go_on: Callable[[], None]) -> ClipOutputs:
    """Make the outputs in ``names`` that the clip has. Calls ``go_on`` often; it may raise."""
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
    return ClipOutputs(made, copied + sum(each.nbytes for each in made.values()))
