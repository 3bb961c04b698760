"""Animates a portrait by its sound: bends the picture frame by frame, no weights.

Every frame samples the portrait through a grid (``grid_sample``) that moves the head as a whole,
opens the jaw by how loud the sound is at that time, and closes the eyes now and then. The inside of
the mouth, which a still picture does not have, is drawn. The face is where ``face`` says.
"""

import math

import torch
import torch.nn.functional as nn

from clips.plan.plan import SAMPLE_RATE, ClipPlan
from clips.render.stages import face
from clips.render.stages.base import Step, VideoProvider

_BATCH = 8
_COARSE = 4
_JAW = 0.12
"""How far the jaw drops, in the picture's coordinates, when the sound is loudest."""
_BLINK_EVERY_S = 3.1
_BLINK_S = 0.22
_SMOOTH_S = 0.06
_INSIDE = (0.22, 0.06, 0.07)
_TEETH = (0.93, 0.92, 0.88)


class WarpVideo(VideoProvider):
    name = "warp"

    def render(
        self,
        plan: ClipPlan,
        actor: torch.Tensor,
        audio: torch.Tensor,
        video: torch.Tensor,
        step: Step,
    ) -> None:
        frames, size = video.shape[0], video.shape[-1]
        opening = mouth_opening(audio, frames, plan.fps)
        bend = _Bend(actor, size)
        for first in range(0, frames, _BATCH):
            step(first / frames)
            end = min(frames, first + _BATCH)
            times = torch.arange(first, end, device=video.device) / plan.fps
            pictures = bend.frames(opening[first:end], times)
            video[first:end].copy_(pictures.mul_(255).round_().clamp_(0, 255))
        step(1.0)


def mouth_opening(audio: torch.Tensor, frames: int, fps: int) -> torch.Tensor:
    """Opening ``[frames]`` of the mouth, 0 to 1: the sound's envelope (root of its mean square over
    each frame's time), smoothed a little, relative to its 95th percentile."""
    per_frame = SAMPLE_RATE / fps
    window = max(1, round(per_frame))
    padded = nn.pad(audio, (0, max(0, math.ceil(frames * per_frame) + window - audio.numel())))
    starts = (torch.arange(frames, device=audio.device) * per_frame).long()
    power = nn.pad(padded.double().square().cumsum(0), (1, 0))
    envelope = ((power[starts + window] - power[starts]) / window).clamp_min(0).sqrt().float()
    taps = max(1, 2 * round(_SMOOTH_S * fps / 2) + 1)
    smooth = nn.avg_pool1d(envelope[None, None], taps, 1, taps // 2, count_include_pad=False)[0, 0]
    loudest = torch.quantile(smooth, 0.95).clamp_min(1e-4)
    return (smooth / loudest).clamp(0, 1)


class _Bend:
    """Makes frames of one portrait at one size. The bend is smooth, so it is computed for every
    fourth pixel of either side."""

    def __init__(self, actor: torch.Tensor, size: int) -> None:
        self._actor = actor
        self._size = size
        self._x, self._y = _axes(size, actor.device)
        self._coarse_x, self._coarse_y = _axes(max(16, size // _COARSE), actor.device)
        at = torch.tensor([[[[x, y - 0.09] for x, y in face.EYES]]], device=actor.device)
        self._lids = nn.grid_sample(actor[None], at, align_corners=False)[0, :, 0]

    def frames(self, opening: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Frames ``[n, 3, size, size]``, 0 to 1, at ``t`` ``[n]`` seconds."""
        bend = self._displacement(opening, t)
        bend = nn.interpolate(bend, self._size, mode="bilinear", align_corners=False)
        from_x, from_y = self._x + bend[:, 0], self._y + bend[:, 1]
        grid = torch.stack((from_x, from_y), dim=-1)
        pictures = nn.grid_sample(
            self._actor.expand(len(t), -1, -1, -1), grid, padding_mode="border", align_corners=False
        )
        # Positions in the head without the jaw's part: mouth and lids are drawn by these.
        drop = (_JAW * opening)[:, None, None]
        self._draw_mouth(pictures, from_x, self._y + bend[:, 2], drop)
        self._draw_lids(pictures, from_x, self._y + bend[:, 2], closed_eyes(t)[:, None, None])
        return pictures

    def _displacement(self, opening: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Displacements ``[n, 3, coarse, coarse]``: to the side, down, and down without the jaw."""
        x, y = self._coarse_x, self._coarse_y
        # The head sways and nods slowly, and a little with its speech.
        angle = (0.035 * torch.sin(0.9 * t) + 0.012 * torch.sin(2.3 * t))[:, None, None]
        shift_x = (0.018 * torch.sin(0.7 * t + 1))[:, None, None]
        shift_y = (0.012 * torch.sin(1.3 * t) + 0.010 * opening)[:, None, None]
        # Pixels far from the face do not move with it.
        near = torch.sigmoid(8 * (1.05 - (x**2 + y**2).sqrt()))
        cos, sin = torch.cos(angle), torch.sin(angle)
        head_x = near * (cos * x + sin * y - shift_x - x)
        head_y = near * (cos * y - sin * x - shift_y - y)
        # Pixels below the lips are sampled from further up.
        mouth_x, mouth_y = face.MOUTH
        below = y + head_y - mouth_y
        jaw = torch.sigmoid(40 * below) * _bump(x + head_x - mouth_x, 0.42)
        jaw = jaw * (1 - (below / 0.5).clamp(0, 1)).sqrt()
        return torch.stack((head_x, head_y - (_JAW * opening)[:, None, None] * jaw, head_y), dim=1)

    def _draw_mouth(
        self, pictures: torch.Tensor, x: torch.Tensor, y: torch.Tensor, drop: torch.Tensor
    ) -> None:
        """Draw the inside of the mouth, which a still picture does not have."""
        part = self._around(face.MOUTH, 0.28, 0.30)
        x, y = x[part] - face.MOUTH[0], y[part] - face.MOUTH[1] - 0.006
        half = (drop / 2).clamp_min(1e-4)
        wide = face.MOUTH_RADII[0] * (0.95 - 0.8 * drop)
        radius = ((x / wide) ** 2 + ((y - half) / half) ** 2).sqrt()
        cover = ((1 - radius) * 10).clamp(0, 1) * (drop > 0.008)
        teeth = cover * ((0.45 * half - y) * 90).clamp(0, 1) * (drop > 0.03)
        _paint(pictures, part, cover, torch.tensor(_INSIDE, device=x.device))
        _paint(pictures, part, teeth, torch.tensor(_TEETH, device=x.device))

    def _draw_lids(
        self, pictures: torch.Tensor, x: torch.Tensor, y: torch.Tensor, closed: torch.Tensor
    ) -> None:
        """Draw lids that come down over the eyes."""
        if not bool(closed.any()):
            return
        wide, high = (1.12 * radius for radius in face.EYE_RADII)
        for number, (eye_x, eye_y) in enumerate(face.EYES):
            part = self._around((eye_x, eye_y), 0.2, 0.16)
            in_x, in_y = (x[part] - eye_x) / wide, (y[part] - eye_y) / high
            edge = 8 * self._size / 64
            eye = ((1 - (in_x**2 + in_y**2).sqrt()) * edge).clamp(0, 1)
            lid = eye * ((2 * closed - 1 - in_y) * edge).clamp(0, 1)
            lash = lid * (1 - ((2 * closed - 1 - in_y) * 7)).clamp(0, 1)
            _paint(pictures, part, lid, self._lids[:, number])
            _paint(pictures, part, 0.7 * lash, 0.3 * self._lids[:, number])

    def _around(
        self, at: tuple[float, float], wide: float, high: float
    ) -> tuple[slice, slice, slice]:
        """Slices of frames, rows and columns around ``at``."""

        def pixels(middle: float, reach: float) -> slice:
            first, last = (
                round((v + 1) / 2 * self._size) for v in (middle - reach, middle + reach)
            )
            return slice(max(0, first), last)

        return slice(None), pixels(at[1], high), pixels(at[0], wide)


def _axes(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    axis = (torch.arange(size, device=device, dtype=torch.float32) + 0.5) * 2 / size - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return x, y


def _paint(
    pictures: torch.Tensor,
    part: tuple[slice, slice, slice],
    cover: torch.Tensor,
    colour: torch.Tensor,
) -> None:
    region = pictures[:, :, part[1], part[2]]
    ink = colour[None, :, None, None].expand_as(region)
    region.copy_(torch.lerp(region, ink, cover[:, None]))


def closed_eyes(t: torch.Tensor) -> torch.Tensor:
    """How far the eyes are closed, 0 to 1, at ``t`` seconds."""
    since = (t + 0.8) % _BLINK_EVERY_S
    return torch.where(since < _BLINK_S, torch.sin(math.pi * since / _BLINK_S) ** 2, 0.0)


def _bump(distance: torch.Tensor, width: float) -> torch.Tensor:
    """A smooth bump: 1 at ``distance`` 0, 0 from ``width`` on."""
    return (1 - (distance / width).square()).clamp_min(0) ** 2
