"""Images as the library's model takes them: decoded within bounds, prepared by the checkpoint's own
image processor.

The processor's text side is not used: how often an image's token comes in a prompt is stated on the
card (``Vision``), by which orchestrators have put it there already.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from worker.engines.transformers.decoder import LibraryDecoder
from worker.errors import InvalidCall
from worker.extras import pip_install
from worker.log import model_log
from worker.protocol import Vision
from worker.settings import WorkerSettings
from worker.text import Tokenizer

Pixels = Mapping[str, Tensor]
"""Inputs of a model for the images of one prompt, by the names of its arguments."""

MAX_PIXELS: Final = 2**26
"""Most pixels of an image that is decoded: 200 MB as red, green and blue."""
_FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP")
_SIZES: Final = ((32, 32), (448, 224))
"""Width and height of two blank images that are read as a trial: one of them is scaled up by models
whose number of tokens depends on the size."""


class Blind(Exception):
    """Images cannot be read; the message says why, for the log."""


class ImageReader:
    """Decodes and prepares images. ``vision`` is how the model counts them."""

    def __init__(self, processor: Any, vision: Vision) -> None:
        self._processor = processor
        self.vision = vision

    def places_in(self, token_ids: Sequence[int]) -> list[int]:
        """Where a prompt has tokens of images."""
        return [at for at, one in enumerate(token_ids) if one == self.vision.token_id]

    def read(self, files: Sequence[bytes], places: int) -> Pixels:
        """Prepare a prompt's images, which has that many ``places`` for their tokens. Any thread.

        Raises ``InvalidCall`` for what is no image, and if its tokens are not as many.
        """
        tokens = 0
        found: list[Pixels] = []
        # One after the other: decoded, an image may take a thousand times the bytes of its file.
        for number, file in enumerate(files, 1):
            image = _decoded(file, number)
            try:
                tokens += self.vision.tokens_of(*image.size)
            except ValueError as error:
                raise InvalidCall(f"image {number} cannot be read: {error}") from None
            found.append(prepared(self._processor, image))
        if tokens != places:
            raise InvalidCall(
                f"the prompt has {places} tokens for images of which the model makes {tokens}: it"
                " was made for another model or with other settings of it"
            )
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
        said = str(error).strip().split("\n")[0]
        why = said if isinstance(error, Blind) else f"{type(error).__name__}: {said}"
        model_log.warning("%s is served for text only, without its images: %s", path, why)
        return None


def prepared(processor: Any, image: Any) -> Pixels:
    """Inputs of the model for a decoded image."""
    found = processor(images=[image], return_tensors="pt")
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _opened(
    settings: WorkerSettings, decoder: LibraryDecoder, tokenizer: Tokenizer, token_id: int
) -> ImageReader:
    token = tokenizer.spelling_of(token_id)
    if not token or token not in tokenizer.chat_template:
        raise Blind(f"its chat template does not write the token of an image ({token or token_id})")
    try:
        from PIL import Image
    except ImportError as error:
        raise Blind(f"Pillow cannot be imported ({error}): {pip_install('images')}") from error
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
        settings.model_path,
        local_files_only=True,
        trust_remote_code=settings.trust_remote_code,
    )
    blank = [prepared(processor, Image.new("RGB", size)) for size in _SIZES]
    counts = [decoder.count_image_tokens(pixels) for pixels in blank]
    vision = _rule(token, token_id, processor, counts)
    for pixels, count in zip(blank, counts, strict=True):
        ids = torch.full((1, count), token_id, device=decoder.device)
        logits, _, _ = decoder.run_images(ids, decoder.new_cache(), pixels, token_id)
        if not bool(torch.isfinite(logits).all()):
            raise Blind("the logits after a blank image are not finite")
    return ImageReader(processor, msgspec.structs.replace(vision, max_bytes=settings.image_bytes))


def _rule(token: str, token_id: int, processor: Any, counts: Sequence[int]) -> Vision:
    """The rule that gives blank images of ``_SIZES`` these numbers of tokens. Raises ``Blind``."""
    if len(set(counts)) == 1 and counts[0] > 0:
        return Vision(token, token_id, image_tokens=counts[0])
    try:
        vision = Vision(
            token,
            token_id,
            cell=int(processor.patch_size) * int(processor.merge_size),
            least_pixels=int(processor.size["shortest_edge"]),
            most_pixels=int(processor.size["longest_edge"]),
        )
        if [vision.tokens_of(*size) for size in _SIZES] == list(counts):
            return vision
    except (AttributeError, KeyError, TypeError):
        pass
    raise Blind("how many tokens an image has follows from its size by a rule that is not known")


def _decoded(file: bytes, number: int) -> Any:
    """A file as an RGB image, turned as its metadata says. Raises ``InvalidCall``."""
    from PIL import Image, ImageOps

    try:
        # Reads no more than the header, so that a bomb is seen before it is decoded.
        image = Image.open(io.BytesIO(file), formats=_FORMATS)
        if image.width * image.height <= MAX_PIXELS:
            return ImageOps.exif_transpose(image).convert("RGB")
        what = f"has more than {MAX_PIXELS} pixels"
    except Exception as error:  # Pillow's decoders raise many kinds
        what = f"cannot be decoded ({type(error).__name__})"
    raise InvalidCall(f"image {number} {what}")
