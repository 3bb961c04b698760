"""One forward pass of a library's model, whatever its architecture calls its arguments."""

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

# The library's classes have no types of their own here.
Cache = Any

_POSITIONS: Final = "position_ids"
_MASK: Final = "attention_mask"
_KINDS: Final = "mm_token_type_ids"
"""Argument that says of each token whether it is text (0) or belongs to an image (1)."""


class LibraryDecoder:
    """A model in its device's memory. Caches are the library's, one or more texts in each."""

    def __init__(self, model: Any, device: torch.device) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._model = model
        self._device = device
        self._cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._takes = {name for name in (_POSITIONS, _MASK, _KINDS) if name in parameters}
        self._keeps_last = "logits_to_keep" in parameters
        self.vocab_size = 0
        """Width of the logits; the caller cuts them to the tokenizer's vocabulary."""

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def image_token_id(self) -> int | None:
        """Id of the token that stands for an image; None for a model of text only."""
        if not hasattr(self._model, "get_image_features"):
            return None
        found = getattr(self._model.config, "image_token_id", None)
        return found if isinstance(found, int) else None

    def new_cache(self) -> Cache:
        """A cache for one text. Masks make sliding windows, so that any layer can be padded."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        return DynamicCache() if _is_padded(cache) else cache

    @property
    def can_batch(self) -> bool:
        """Whether padding may be tried: keys and values can be padded, states cannot."""
        from transformers import DynamicCache

        return _is_padded(DynamicCache(config=self._model.config)) and _MASK in self._takes

    @torch.inference_mode()
    def run(
        self, ids: Tensor, cache: Cache, positions: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Compute ``ids`` [rows, tokens]: the logits after the last, float32 [rows, vocabulary],
        and the cache with these tokens in it. ``mask`` [rows, all tokens] is 0 where a row is
        padded."""
        asked: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if _POSITIONS in self._takes:
            asked[_POSITIONS] = positions
        if mask is not None:
            asked[_MASK] = mask
        if self._keeps_last:
            asked["logits_to_keep"] = 1
        made = self._model(input_ids=ids, **asked)
        kept = getattr(made, self._cache_name, None)
        return made.logits[:, -1].float(), cache if kept is None else kept

    @torch.inference_mode()
    def run_images(
        self, ids: Tensor, cache: Cache, pixels: Mapping[str, Tensor], token_id: int
    ) -> tuple[Tensor, Cache, int]:
        """Compute the beginning of one text, ``ids`` [1, tokens], with its images, of which the
        tokens are ``token_id``.

        Returns the logits after the last, float32 [1, vocabulary], the cache, and the text's shift:
        the position of each later token is its place in the text plus that. Models which place an
        image's tokens in two dimensions use up fewer positions than tokens.
        """
        asked: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        asked |= self._on_device(pixels)
        if _KINDS in self._takes:
            asked[_KINDS] = (ids == token_id).int()
        if self._keeps_last:
            asked["logits_to_keep"] = 1
        inner = getattr(self._model, "model", None)
        if inner is not None and hasattr(inner, "rope_deltas"):
            inner.rope_deltas = None  # that of the text before
        made = self._model(input_ids=ids, **asked)
        deltas = getattr(inner, "rope_deltas", None)
        shift = 0 if deltas is None else int(deltas.reshape(-1)[0])
        kept = getattr(made, self._cache_name, None)
        return made.logits[:, -1].float(), cache if kept is None else kept, shift

    @torch.inference_mode()
    def count_image_tokens(self, pixels: Mapping[str, Tensor]) -> int:
        """How many tokens the model makes of images."""
        found = self._model.get_image_features(**self._on_device(pixels))
        features = getattr(found, "pooler_output", found)
        parts = features if isinstance(features, list | tuple) else [features]
        width = self._model.config.get_text_config(decoder=True).hidden_size
        return int(sum(part.numel() for part in parts) // width)

    def _on_device(self, pixels: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dtype = self._model.dtype
        return {
            name: value.to(self._device, dtype if value.is_floating_point() else None)
            for name, value in pixels.items()
        }

    def close(self) -> None:
        """Drop the model."""
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def cache_bytes(cache: Cache) -> int:
    """Bytes of the keys and values that a cache holds."""
    found = 0
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, Tensor):
                found += tensor.nbytes
    return found


def _is_padded(cache: Cache) -> bool:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    kinds = {type(layer) for layer in cache.layers}
    return kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
