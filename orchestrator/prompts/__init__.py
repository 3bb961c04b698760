"""What turns text into token ids without ever holding up those who are in a hurry."""

from orchestrator.prompts.bound import TokenBound
from orchestrator.prompts.lookalikes import Lookalikes, unicode_normalizer
from orchestrator.prompts.slices import Slicer
from orchestrator.prompts.stage import EncodingStage, Steps

__all__ = [
    "EncodingStage",
    "Lookalikes",
    "Slicer",
    "Steps",
    "TokenBound",
    "unicode_normalizer",
]
