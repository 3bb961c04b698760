"""How many images a request may have, and how many are kept at a time.

Checked by what their headers say, before anything is decoded: only workers do that.
"""

from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import Field

from orchestrator.errors import InvalidRequest, QueueFull
from orchestrator.tasks.image import Image
from orchestrator.tasks.task import Task
from worker.environment import HIDDEN, Section

MAX_PIXELS = 2**26
"""Most pixels that ``max_pixels`` may allow: what workers decode at all."""
ALL_BYTES: Final = 512 * 2**20
"""Bytes that the images of all requests that wait or run may have; more are answered 429."""


class ImageLimits(Section):
    """Images in chats, for models that read them. A request's body, which has them as base64, is
    bounded by ``TIDEGATE_HTTP__MAX_BODY_BYTES`` as well."""

    max_count: int = Field(default=16, ge=0)
    """Most images that a chat may have; 0 refuses all."""
    max_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Largest image, as a file."""
    max_pixels: Annotated[int, HIDDEN] = Field(default=2**24, ge=1024, le=MAX_PIXELS)
    """Most pixels of an image: width times height."""


class ImageGate:
    """Keeps images within their limits."""

    def __init__(self, limits: ImageLimits) -> None:
        self.limits = limits
        self.held_bytes = 0
        """Bytes of the images of all tasks that have not ended."""

    def check(self, images: Sequence[Image]) -> None:
        """Raise ``InvalidRequest`` unless a chat may have these images."""
        limits = self.limits
        if len(images) > limits.max_count:
            raise InvalidRequest(
                f"{len(images)} images are more than the {limits.max_count} that a request may "
                "have here: send fewer",
                field="messages",
            )
        for number, image in enumerate(images, 1):
            if len(image.data) > limits.max_bytes:
                raise InvalidRequest(
                    f"image {number} has {len(image.data)} bytes, and at most {limits.max_bytes} "
                    "are taken: send it smaller, or compress it more",
                    field="messages",
                )
            pixels = image.width * image.height
            if pixels > limits.max_pixels:
                raise InvalidRequest(
                    f"image {number} has {image.width}x{image.height} pixels, and at most "
                    f"{limits.max_pixels} in all are taken: scale it down",
                    field="messages",
                )

    def take(self, task: Task, images: Sequence[Image]) -> None:
        """Count a task's images until its end. Raises ``QueueFull`` where too many are kept."""
        size = sum(len(image.data) for image in images)
        if self.held_bytes and self.held_bytes + size > ALL_BYTES:
            raise QueueFull(
                f"images of {self.held_bytes} bytes are in requests that wait or run; try again "
                "shortly"
            )
        self.held_bytes += size
        task.images = images
        task.on_end.append(lambda ended: self._drop(size))

    def _drop(self, size: int) -> None:
        self.held_bytes -= size
