"""Images for vLLM: decoded within our bounds, prepared by vLLM's own processor.

The processor gets each image with its one token, and returns the tokens that it makes of that. It
gets no whole prompts: orchestrators have inserted the tokens, by the card's ``Vision``.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from protocol import ImageTokens, Vision, keyed_by_images
from worker.core import Job
from worker.errors import InvalidCall
from worker.log import model_log
from worker.settings import WorkerSettings
from worker.text import Tokenizer

IMAGE_BYTES: Final = 32 * 2**20
"""Maximum total bytes of a prompt's image files."""
MAX_PIXELS: Final = 2**26
"""Maximum pixels of a decoded image: 200 MB as RGB."""
_FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP")
_SIZES: Final = ((32, 32), (448, 224))
"""Width and height of two blank images that are read as a trial: one of them is scaled up by models
whose number of tokens depends on the size."""


class Blind(Exception):
    """Images cannot be read; the message says why, for the log."""


def blank_images() -> list[Any]:
    """Images for ``counting_rule``. Raises ``Blind`` without Pillow."""
    try:
        from PIL import Image
    except ImportError as error:
        raise Blind(f"Pillow cannot be imported ({error}): tidegate engines ensure vllm") from error
    return [Image.new("RGB", size) for size in _SIZES]


def blank_file() -> tuple[bytes, tuple[int, int]]:
    """A blank image as a file, with its width and height."""
    (image, *_), file = blank_images(), io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), image.size


def image_token(tokenizer: Tokenizer, token_id: int) -> str:
    """The token of an image as chat templates write it. Raises ``Blind`` if this one does not."""
    token = tokenizer.spelling_of(token_id)
    if not token or token not in tokenizer.chat_template:
        raise Blind(f"its chat template does not write the token of an image ({token or token_id})")
    return token


def counting_rule(
    token: str, token_id: int, processor: Any, counts: Sequence[int], max_bytes: int
) -> Vision:
    """The rule that gives ``blank_images`` these numbers of tokens. ``processor`` is the
    checkpoint's own image processor. Raises ``Blind`` if no rule is known."""
    if len(set(counts)) == 1 and counts[0] > 0:
        return Vision(token, token_id, image_tokens=counts[0], max_bytes=max_bytes)
    try:
        vision = Vision(
            token,
            token_id,
            cell=int(processor.patch_size) * int(processor.merge_size),
            least_pixels=int(processor.size["shortest_edge"]),
            most_pixels=int(processor.size["longest_edge"]),
            max_bytes=max_bytes,
        )
        if [vision.tokens_of(*size) for size in _SIZES] == list(counts):
            return vision
    except (AttributeError, KeyError, TypeError):
        pass
    raise Blind("how many tokens an image has follows from its size by a rule that is not known")


def places_of(vision: Vision, token_ids: Sequence[int]) -> list[int]:
    """Positions of a prompt's image tokens. Raises ``InvalidCall`` if it has none."""
    places = [at for at, one in enumerate(token_ids) if one == vision.token_id]
    if not places:
        raise InvalidCall("the prompt has images, and no tokens for them")
    return places


def decoded(vision: Vision, file: bytes, number: int) -> tuple[Any, int]:
    """A file as an RGB image, turned as its metadata says, and the number of its tokens. Raises
    ``InvalidCall`` for what is not an image that the model reads; ``number`` names it there."""
    from PIL import Image, ImageOps

    try:
        # Reads only the header, so that a decompression bomb is detected before it is decoded.
        image: Any = Image.open(io.BytesIO(file), formats=_FORMATS)
        is_small = image.width * image.height <= MAX_PIXELS
        if is_small:
            image = ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # Pillow's decoders raise many kinds
        what = f"cannot be decoded ({type(error).__name__})"
        raise InvalidCall(f"image {number} {what}") from None
    if not is_small:
        raise InvalidCall(f"image {number} has more than {MAX_PIXELS} pixels")
    try:
        return image, vision.tokens_of(*image.size)
    except ValueError as error:
        raise InvalidCall(f"image {number} cannot be read: {error}") from None


def check_count(tokens: int, places: int) -> None:
    """Raise ``InvalidCall`` unless a prompt has as many places as its images have tokens."""
    if tokens != places:
        raise InvalidCall(
            f"the prompt has {places} tokens for images of which the model makes {tokens}: it"
            " was made for another model or with other settings of it"
        )


@dataclass(frozen=True, slots=True)
class Pictures:
    """A prompt's images for vLLM: a ``MultiModalFeatureSpec`` for each, and the prompt's tokens as
    the hashes of its KV blocks have them."""

    features: list[Any]
    keyed: Sequence[int]


class VisionReader:
    """Decodes and prepares images. ``vision`` is how the model counts them."""

    def __init__(self, processor: Any, vision: Vision) -> None:
        self._processor = processor
        self.vision = vision

    def read(self, job: Job) -> Pictures:
        """Prepare the images of a job's prompt. Any thread.

        Raises ``InvalidCall`` for what is not an image, and if the prompt's number of image tokens
        differs from vLLM's.
        """
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        # Tokens generated elsewhere may include that token too, but they stand for no image.
        prompt = job.token_ids[: len(job.token_ids) - job.begun_tokens]
        places = places_of(self.vision, prompt)
        features: list[Any] = []
        images: list[ImageTokens] = []
        done = 0
        for number, file in enumerate(job.images, 1):
            image, count = decoded(self.vision, file, number)
            digest = hashlib.sha256(file).digest()
            # A tenant's computed image must not be found by another tenant's request.
            name = f"{digest.hex()} {job.cache_salt}"
            data, tokens, is_embed = prepared(self._processor, image, name, self.vision.token_id)
            here = places[done : done + count]
            if tokens != count or (here and here[-1] - here[0] != len(here) - 1):
                raise InvalidCall(f"image {number} has other tokens in the prompt than vLLM makes")
            at = PlaceholderRange(here[0] if here else 0, count, is_embed)
            features.append(MultiModalFeatureSpec(data, "image", name, at, name))
            images.append(ImageTokens(digest, count))
            done += count
        check_count(done, len(places))
        return Pictures(features, keyed_by_images(prompt, self.vision.token_id, images))


def open_images(settings: WorkerSettings, config: Any, tokenizer: Tokenizer) -> VisionReader | None:
    """The reader of a model's images; None if it reads text only. If only its images cannot be read
    here, the log says why, and vLLM skips the image parts."""
    model = config.model_config
    if not model.is_multimodal_model or model.multimodal_config.language_model_only:
        return None
    model.skip_tokenizer_init = False  # vLLM's processors ask for its own tokenizer
    try:
        return _opened(settings, model, tokenizer)
    except Exception as error:  # any error of a library or a model's own code
        kind = "" if isinstance(error, Blind) else f"{type(error).__name__}: "
        model_log.warning(
            "%s is served for text only, without its images: %s%s",
            settings.model_path,
            kind,
            str(error).strip().split("\n")[0],
        )
        model.skip_tokenizer_init = True
        model.multimodal_config.language_model_only = True
        return None


def prepared(processor: Any, image: Any, name: str, token_id: int) -> tuple[Any, int, Any]:
    """vLLM's inputs for a decoded image, the number of its tokens, and which of them the model
    replaces (None for all). Raises ``Blind`` if these are more than the image's own token."""
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    items = processor.info.parse_mm_data({"image": [image]})
    asked = ProcessorInputs([token_id], items, {"image": [name]})
    made = processor.apply(asked, TimingContext(enabled=False))
    ids, (at,) = made["prompt_token_ids"], made["mm_placeholders"]["image"]
    if set(ids) != {token_id} or at.length != len(ids):
        raise Blind("an image has more than its own token in a prompt")
    return made["mm_kwargs"]["image"][0], len(ids), at.is_embed


def _opened(settings: WorkerSettings, model: Any, tokenizer: Tokenizer) -> VisionReader:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    if model.uses_mrope:
        raise Blind(
            "its tokens have positions in two dimensions, with which vLLM's texts about images were"
            " not those of transformers"
        )
    config = model.hf_config
    token_id = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if not isinstance(token_id, int):
        raise Blind("its config.json names no image_token_id")
    token = image_token(tokenizer, token_id)
    blank = blank_images()
    processor = MULTIMODAL_REGISTRY.create_processor(model)
    counts = [prepared(processor, image, str(at), token_id)[1] for at, image in enumerate(blank)]
    own = processor.info.get_hf_processor().image_processor
    return VisionReader(processor, counting_rule(token, token_id, own, counts, IMAGE_BYTES))
