"""Turns text and chats into token ids, without ever delaying urgent requests.

- ``encoder``        one model's tokenizer and chat template
- ``chat_template``  the Jinja sandbox
- ``stage``          long prompts, on threads, by deadline
- ``slices``         where a text may be cut without changing its tokens
- ``bound``          how many tokens a text has at the least
- ``lookalikes``     a client's text that looks like a special token
"""

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
