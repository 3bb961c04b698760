"""Greedy texts compared with what ``transformers`` computes for the same checkpoint."""

from pathlib import Path
from typing import Any

from tests.support.lazy import transformers

CLOSE = 2e-3
"""Two tokens whose logits differ by less than this share of their range may change places."""


def oracle(checkpoint: Path) -> Any:
    """The model in float32, by the library's own code: of its kinds of attention the one that has
    all that models may ask for, soft caps and sinks among it."""
    import torch

    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )


def assert_likeliest(model: Any, ids: list[int], made: list[int]) -> None:
    """Each of the tokens that were ``made`` is the likeliest after those before it, or as good."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *made]])).logits[0].float()
    for at, token in enumerate(made, len(ids) - 1):
        reach = float(logits[at].max() - logits[at].min())
        short = float(logits[at].max() - logits[at, token])
        assert short <= CLOSE * reach, f"token {at - len(ids) + 1} falls short by {short:.3g}"
