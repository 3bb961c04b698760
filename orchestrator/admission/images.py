"""Limits on the images of a request, and of all requests together.

The limit on the request body (``http.max_body_bytes``) also limits an image's bytes. Pixels are
checked from the image headers: only workers decode images.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from orchestrator.errors import InvalidRequest, QueueFull
from orchestrator.fair_share import is_over_share
from orchestrator.tasks.image import Image
from orchestrator.tasks.task import Task

MAX_COUNT: Final = 16
"""Maximum number of images of a chat."""
MAX_PIXELS: Final = 2**24
"""Maximum pixels of an image: width times height."""
ALL_BYTES: Final = 512 * 2**20
"""Maximum image bytes of all waiting and running requests; further ones get status 429."""


class ImageGate:
    """Enforces the limits on images."""

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
                "have: send fewer",
                field="messages",
            )
        for number, image in enumerate(images, 1):
            pixels = image.width * image.height
            if pixels > MAX_PIXELS:
                raise InvalidRequest(
                    f"image {number} has {image.width}x{image.height} pixels, and at most "
                    f"{MAX_PIXELS} in total are allowed: scale it down",
                    field="messages",
                )

    def take(self, task: Task, images: Sequence[Image]) -> None:
        """Count a task's images until its end. Raises ``QueueFull`` if too many bytes are held."""
        size, tenant = sum(len(image.data) for image in images), task.job.tenant
        own, left = self._held[tenant], ALL_BYTES - self.held_bytes
        if size and ((self.held_bytes and size > left) or is_over_share(own, size, left)):
            raise QueueFull(
                f"waiting and running requests hold {self.held_bytes} bytes of images, {own} of "
                "them this tenant's; try again shortly"
            )
        self._count(tenant, size)
        task.images = images
        task.on_end.append(lambda ended: self._count(tenant, -size))

    def _count(self, tenant: str, more: int) -> None:
        self.held_bytes += more
        self._held[tenant] += more
        if not self._held[tenant]:
            del self._held[tenant]
