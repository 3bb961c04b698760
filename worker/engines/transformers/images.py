"""Images as the library's model takes them: decoded within bounds, prepared by the checkpoint's own
image processor.

The processor's text side is not used: how often an image's token comes in a prompt is stated on the
card (``Vision``), by which orchestrators have put it there already.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from protocol import Vision
from worker.engines.images import (
    Blind,
    blank_images,
    check_count,
    counting_rule,
    decoded,
    image_token,
    why_blind,
)
from worker.engines.transformers.decoder import LibraryDecoder
from worker.log import model_log
from worker.settings import WorkerSettings
from worker.text import Tokenizer

Pixels = Mapping[str, Tensor]
"""Inputs of a model for the images of one prompt, by the names of its arguments."""


class ImageReader:
    """Decodes and prepares images. ``vision`` is how the model counts them."""

    def __init__(self, processor: Any, vision: Vision) -> None:
        self._processor = processor
        self.vision = vision

    def read(self, files: Sequence[bytes], places: int) -> Pixels:
        """Prepare a prompt's images, which has that many ``places`` for their tokens. Any thread.

        Raises ``InvalidCall`` for what is not an image, and if its tokens are not as many.
        """
        tokens = 0
        found: list[Pixels] = []
        # One after the other: decoded, an image may take a thousand times the bytes of its file.
        for number, file in enumerate(files, 1):
            image, count = decoded(self.vision, file, number)
            tokens += count
            found.append(prepared(self._processor, image))
        check_count(tokens, places)
        return {name: torch.cat([one[name] for one in found]) for name in found[0]}


def open_images(
    settings: WorkerSettings, decoder: LibraryDecoder, tokenizer: Tokenizer
) -> ImageReader | None:
    """The reader of a model's images, tried out; None where it reads text only. If only its images
    cannot be read here, the log says why."""
    token_id, path = decoder.image_token_id, settings.model_path
    if token_id is None or not settings.image_bytes:
        return None
    try:
        return _opened(settings, decoder, tokenizer, token_id)
    except Exception as error:  # whatever a library, or a model's own code, raises
        why = why_blind(error)
        model_log.warning("%s is served for text only, without its images: %s", path, why)
        return None


def prepared(processor: Any, image: Any) -> Pixels:
    """Inputs of the model for a decoded image."""
    found = processor(images=[image], return_tensors="pt")
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _opened(
    settings: WorkerSettings, decoder: LibraryDecoder, tokenizer: Tokenizer, token_id: int
) -> ImageReader:
    token = image_token(tokenizer, token_id)
    blank = blank_images()
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
        settings.model_path,
        local_files_only=True,
        trust_remote_code=settings.trust_remote_code,
    )
    inputs = [prepared(processor, image) for image in blank]
    counts = [decoder.count_image_tokens(pixels) for pixels in inputs]
    vision = counting_rule(token, token_id, processor, counts, settings.image_bytes)
    for pixels, count in zip(inputs, counts, strict=True):
        ids = torch.full((1, count), token_id, device=decoder.device)
        logits, _, _ = decoder.run_images(ids, decoder.new_cache(), pixels, token_id)
        if not bool(torch.isfinite(logits).all()):
            raise Blind("the logits after a blank image are not finite")
    return ImageReader(processor, vision)
