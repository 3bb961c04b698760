"""An architecture: Llama with embeddings times the root of the hidden size, as Gemma has them."""

import math
from typing import Final

from torch import Tensor

from worker.models.model import Decoder


class ScaledDecoder(Decoder):
    """See ``Decoder``."""

    def embedded(self, token_ids: Tensor) -> Tensor:
        return super().embedded(token_ids) * math.sqrt(self.config.hidden_size)


DECODER: Final = ScaledDecoder
