"""How many images a request may have, and how many are kept at a time.

Their bytes are bounded with the body that they come in (``http.max_body_bytes``). Pixels are
checked by what their headers say, before anything is decoded: only workers do that.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from orchestrator.errors import InvalidRequest, QueueFull
from orchestrator.fair_share import is_over_share
from orchestrator.tasks.image import Image
from orchestrator.tasks.task import Task

MAX_COUNT: Final = 16
"""Most images that a chat may have."""
MAX_PIXELS: Final = 2**24
"""Most pixels of an image: width times height."""
ALL_BYTES: Final = 512 * 2**20
"""Bytes that the images of all requests that wait or run may have; more are answered 429."""


class ImageGate:
    """Keeps images within their limits."""

    def __init__(self) -> None:
        self.held_bytes = 0
        """Bytes of the images of all tasks that have not ended."""
        self._held: Counter[str] = Counter()
        """Bytes of images, by tenant."""

    def check(self, images: Sequence[Image]) -> None:
        """Raise ``InvalidRequest`` unless a chat may have these images."""
        if len(images) > MAX_COUNT:
            raise InvalidRequest(
                f"{len(images)} images are more than the {MAX_COUNT} that a request may "
                "have here: send fewer",
                field="messages",
            )
        for number, image in enumerate(images, 1):
            pixels = image.width * image.height
            if pixels > MAX_PIXELS:
                raise InvalidRequest(
                    f"image {number} has {image.width}x{image.height} pixels, and at most "
                    f"{MAX_PIXELS} in all are taken: scale it down",
                    field="messages",
                )

    def take(self, task: Task, images: Sequence[Image]) -> None:
        """Count a task's images until its end. Raises ``QueueFull`` where too many are kept."""
        size, tenant = sum(len(image.data) for image in images), task.job.tenant
        own, left = self._held[tenant], ALL_BYTES - self.held_bytes
        if size and ((self.held_bytes and size > left) or is_over_share(own, size, left)):
            raise QueueFull(
                f"images of {self.held_bytes} bytes are in requests that wait or run, {own} of "
                "them of this tenant; try again shortly"
            )
        self._count(tenant, size)
        task.images = images
        task.on_end.append(lambda ended: self._count(tenant, -size))

    def _count(self, tenant: str, more: int) -> None:
        self.held_bytes += more
        self._held[tenant] += more
        if not self._held[tenant]:
            del self._held[tenant]
