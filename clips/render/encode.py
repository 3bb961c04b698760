"""Makes a clip's outputs: its tensors, and MP4 (H.264 and AAC), WAV and PNG with PyAV (FFmpeg)."""

import io
import os
import wave
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clips.plan.plan import SAMPLE_RATE
from clips.render.clip import Clip
from worker.errors import LoadError
from worker.extras import pip_install

_AUDIO_FRAME = 1024
_BIT_RATE = 96_000


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise LoadError(f"clips are encoded by PyAV: {pip_install('slot')}") from None
    return av


def check_encoder() -> None:
    """Raise ``LoadError`` if clips cannot be encoded."""
    available = _av().codecs_available
    for codec in ("libx264", "aac", "png"):
        if codec not in available:
            raise LoadError(f"the installed PyAV has no codec {codec}; its wheel from PyPI has")


@dataclass(frozen=True, slots=True)
class ClipOutputs:
    """Output tensors by name. ``copied_bytes``: bytes copied from the clip's buffers into encoders
    and off the device, and of all outputs into Triton's shared memory."""

    tensors: dict[str, NDArray[Any]]
    copied_bytes: int


def outputs_of(names: tuple[str, ...], clip: Clip, go_on: Callable[[], None]) -> ClipOutputs:
    """Make the outputs in ``names`` that the clip has. Calls ``go_on`` often; it may raise."""
    go_on()
    made: dict[str, NDArray[Any]] = {}
    copied = 0

    def encoded(name: str, data: bytes, *parts: torch.Tensor) -> None:
        nonlocal copied
        copied += sum(part.nbytes for part in parts)
        made[name] = np.frombuffer(data, np.uint8)

    def given(name: str, tensor: torch.Tensor) -> None:
        nonlocal copied
        copied += tensor.nbytes if tensor.is_cuda else 0
        made[name] = tensor.cpu().numpy()

    if clip.frames and "mp4" in names:
        encoded("mp4", mp4(clip.video, clip.audio, clip.plan.fps, go_on), clip.video, clip.audio)
    if clip.frames and "video" in names:
        given("video", clip.video)
    if clip.samples and "wav" in names:
        encoded("wav", wav(clip.audio), clip.audio)
    if clip.samples and "audio" in names:
        given("audio", clip.audio)
    if clip.portrait_size and "png" in names:
        encoded("png", png(clip.portrait), clip.portrait)
    if clip.portrait_size and "actor" in names:
        given("actor", clip.portrait)
    return ClipOutputs(made, copied + sum(each.nbytes for each in made.values()))


def mp4(
    video: torch.Tensor,
    audio: torch.Tensor,
    fps: int,
    go_on: Callable[[], None] = lambda: None,
) -> bytes:
    """Encode ``video`` ``[frames, 3, height, width]`` uint8 and ``audio`` ``[samples]`` float32 at
    ``SAMPLE_RATE``. The index comes first, so that a player can start before it has the whole file.
    ``go_on`` is called for each frame, and may raise to end the encoding."""
    # To put the index first, FFmpeg rereads its output, which requires a file (in memory).
    with open(os.memfd_create("clip"), "rb") as file:
        _write_mp4(f"/proc/self/fd/{file.fileno()}", video, audio, fps, go_on)
        return file.read()


def _write_mp4(
    path: str, video: torch.Tensor, audio: torch.Tensor, fps: int, go_on: Callable[[], None]
) -> None:
    av = _av()
    with av.open(path, "w", format="mp4", options={"movflags": "faststart"}) as container:
        pictures = container.add_stream("libx264", rate=fps)
        pictures.height, pictures.width = video.shape[2:]
        pictures.pix_fmt = "yuv420p"
        pictures.options = {"preset": "veryfast", "crf": "20"}
        # One slice per thread would cost bytes and, at these sizes, more time than it saves.
        pictures.codec_context.thread_count = 1
        sound = container.add_stream("aac", rate=SAMPLE_RATE, layout="mono")
        sound.bit_rate = _BIT_RATE
        # FFmpeg's default, "twoloop", takes four times as long and is less accurate for speech.
        sound.options = {"aac_coder": "fast"}
        # Sound and picture are interleaved: a player reads both from one place in the file.
        samples, begun = audio.cpu()[None].numpy(), 0
        for number, picture in enumerate(video.cpu()):
            go_on()
            frame = av.VideoFrame.from_ndarray(_rows(picture), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(pictures.encode(frame))
            until = min((number + 1) * SAMPLE_RATE // fps, samples.shape[1])
            for begin in range(begun, until - _AUDIO_FRAME + 1, _AUDIO_FRAME):
                container.mux(sound.encode(_sound(samples, begin)))
                begun = begin + _AUDIO_FRAME
        for begin in range(begun, samples.shape[1], _AUDIO_FRAME):
            container.mux(sound.encode(_sound(samples, begin)))
        container.mux(pictures.encode(None))
        container.mux(sound.encode(None))


def _sound(samples: Any, begin: int) -> Any:
    part = samples[:, begin : begin + _AUDIO_FRAME]
    frame = _av().AudioFrame.from_ndarray(part, format="fltp", layout="mono")
    frame.sample_rate = SAMPLE_RATE
    frame.pts, frame.time_base = begin, Fraction(1, SAMPLE_RATE)
    return frame


def wav(audio: torch.Tensor) -> bytes:
    """Encode ``audio`` as WAV of 16 bits, mono, at ``SAMPLE_RATE``."""
    file = io.BytesIO()
    with wave.open(file, "wb") as container:
        container.setnchannels(1)
        container.setsampwidth(2)
        container.setframerate(SAMPLE_RATE)
        scaled = (audio.clamp(-1, 1) * 32767).round().to(torch.int16)
        container.writeframes(scaled.cpu().numpy().astype("<i2").tobytes())
    return file.getvalue()


def png(picture: torch.Tensor) -> bytes:
    """Encode ``picture`` ``[3, height, width]``, uint8 or float from 0 to 1, as PNG."""
    av = _av()
    if picture.is_floating_point():
        picture = (picture * 255).round().clamp(0, 255).to(torch.uint8)
    codec = av.CodecContext.create("png", "w")
    codec.height, codec.width = picture.shape[1:]
    codec.pix_fmt = "rgb24"
    codec.time_base = Fraction(1, 1)
    frame = av.VideoFrame.from_ndarray(_rows(picture), format="rgb24")
    return b"".join(bytes(packet) for packet in (*codec.encode(frame), *codec.encode(None)))


def _rows(picture: torch.Tensor) -> Any:
    """``picture`` as an array ``[height, width, 3]``, the order in files."""
    return picture.permute(1, 2, 0).contiguous().cpu().numpy()
