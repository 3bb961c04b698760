"""Draws a portrait: without weights, equal for equal prompts and seeds, on any device.

Shapes are signed distances, drawn over each other from back to front, soft at the edge by a pixel.
"""

import torch

from clips.plan.recipe import Recipe
from clips.render.stages import face
from clips.render.stages.base import PortraitProvider, Step
from clips.render.stages.face import Colour, Look, look_of

_SHADE = 0.86
_LIPS: Colour = (0.72, 0.30, 0.30)
_WHITE: Colour = (0.97, 0.97, 0.97)
_DARK: Colour = (0.10, 0.09, 0.10)
_SHIRT: Colour = (0.22, 0.32, 0.52)


class ProceduralPortrait(PortraitProvider):
    name = "procedural"

    def render(self, recipe: Recipe, actor: torch.Tensor, step: Step) -> None:
        draw(look_of(recipe.portrait.prompt, recipe.portrait.seed), actor, step)


def draw(look: Look, actor: torch.Tensor, step: Step = lambda done: None) -> None:
    """Draw ``look`` into all of ``actor``, ``[3, size, size]`` float32, 0 to 1."""
    picture = _Canvas(actor)
    layers = (_backdrop, _hair_behind, _body, _head, _beard, _mouth, _eyes, _hair_front, _glasses)
    for number, layer in enumerate(layers):
        step(number / len(layers))
        layer(picture, look)
    step(1.0)


class _Canvas:
    def __init__(self, actor: torch.Tensor) -> None:
        self.pixels = actor
        size = actor.shape[-1]
        axis = (torch.arange(size, device=actor.device, dtype=torch.float32) + 0.5) * 2 / size - 1
        self.y, self.x = torch.meshgrid(axis, axis, indexing="ij")
        self._edge = 2.5 / size

    def ellipse(self, at: tuple[float, float], radii: tuple[float, float]) -> torch.Tensor:
        """Coverage ``[size, size]`` of pixels by an ellipse, 0 to 1."""
        x, y = (self.x - at[0]) / radii[0], (self.y - at[1]) / radii[1]
        distance = (torch.sqrt(x * x + y * y) - 1) * min(radii)
        return self.soft(distance)

    def soft(self, distance: torch.Tensor) -> torch.Tensor:
        """Coverage, 0 to 1, of the area where ``distance`` is below 0."""
        return (0.5 - distance / self._edge).clamp(0, 1)

    def paint(self, coverage: torch.Tensor, colour: Colour, light: float = 1.0) -> None:
        ink = torch.tensor(colour, device=self.pixels.device)[:, None, None] * light
        self.pixels.lerp_(ink.expand_as(self.pixels), coverage.expand_as(self.pixels))


def _backdrop(picture: _Canvas, look: Look) -> None:
    colour = torch.tensor(face.BACKDROP[look.backdrop], device=picture.pixels.device)
    light = 1.0 - 0.18 * (picture.x**2 + picture.y**2).sqrt()
    picture.pixels.copy_(colour[:, None, None] * light)


def _hair_behind(picture: _Canvas, look: Look) -> None:
    if look.hair:
        picture.paint(picture.ellipse((0.0, 0.02), (0.60, 0.74)), face.HAIR[look.hair], _SHADE)


def _body(picture: _Canvas, look: Look) -> None:
    picture.paint(picture.ellipse((0.0, 1.20), (0.80, 0.42)), _SHIRT)
    picture.paint(picture.ellipse((0.0, 0.74), (0.19, 0.28)), face.SKIN[look.skin], _SHADE)


def _head(picture: _Canvas, look: Look) -> None:
    skin = face.SKIN[look.skin]
    for side in (-1, 1):
        picture.paint(picture.ellipse((0.49 * side, 0.04), (0.07, 0.12)), skin, _SHADE)
    picture.paint(picture.ellipse(face.FACE, face.FACE_RADII), skin)
    for side in (-1, 1):
        cheek = picture.ellipse((0.27 * side, 0.18), (0.13, 0.10))
        picture.paint(0.18 * cheek, (0.90, 0.45, 0.40))
    nose = picture.ellipse((0.0, 0.12), (0.055, 0.10))
    picture.paint(0.5 * nose, skin, _SHADE)


def _beard(picture: _Canvas, look: Look) -> None:
    if not look.has_beard:
        return
    x, y = face.MOUTH
    chin = picture.ellipse((x, y + 0.12), (0.34, 0.24)) * picture.soft(y - 0.10 - picture.y)
    chin = chin * picture.ellipse(face.FACE, face.FACE_RADII)
    picture.paint(0.85 * chin, face.HAIR[look.hair or "grey"], _SHADE)


def _mouth(picture: _Canvas, look: Look) -> None:
    picture.paint(picture.ellipse(face.MOUTH, face.MOUTH_RADII), _LIPS)
    x, y = face.MOUTH
    line = picture.ellipse((x, y), (face.MOUTH_RADII[0] * 0.9, 0.006))
    picture.paint(0.8 * line, _DARK)


def _eyes(picture: _Canvas, look: Look) -> None:
    brows = face.HAIR[look.hair] if look.hair else face.HAIR["brown"]
    for x, y in face.EYES:
        white = picture.ellipse((x, y), face.EYE_RADII)
        picture.paint(white, _WHITE)
        picture.paint(white * picture.ellipse((x, y), (0.052, 0.056)), (0.28, 0.42, 0.40))
        picture.paint(white * picture.ellipse((x, y), (0.026, 0.028)), _DARK)
        picture.paint(picture.ellipse((x + 0.018, y - 0.020), (0.011, 0.011)), _WHITE)
        picture.paint(picture.ellipse((x, y - 0.135), (0.13, 0.022)), brows, _SHADE)


def _hair_front(picture: _Canvas, look: Look) -> None:
    if not look.hair:
        return
    cap = picture.ellipse((0.0, -0.02), (0.56, 0.62))
    fringe = picture.soft(picture.y + 0.30 - 0.12 * picture.x.abs())
    picture.paint(cap * fringe, face.HAIR[look.hair])


def _glasses(picture: _Canvas, look: Look) -> None:
    if not look.has_glasses:
        return
    for x, y in face.EYES:
        rim = picture.ellipse((x, y), (0.165, 0.13)) - picture.ellipse((x, y), (0.140, 0.105))
        picture.paint(rim.clamp(0, 1), _DARK)
    y = face.EYES[0][1]
    bridge = picture.ellipse((0.0, y), (0.06, 0.012))
    picture.paint(bridge, _DARK)
