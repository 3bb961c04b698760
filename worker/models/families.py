"""The supported architectures, and how each differs from Llama. No torch.

docs/extending.md explains how to add one.
"""

from dataclasses import dataclass
from typing import Final, Literal

WindowRule = Literal["none", "every-layer", "by-layer", "by-pattern"]


@dataclass(frozen=True, slots=True)
class Family:
    """Traits of an architecture that its ``config.json`` omits or states differently.

    ``window``: ``every-layer`` reads ``sliding_window`` (Mistral 0.1); ``by-layer`` reads
    ``use_sliding_window``, ``max_window_layers`` and ``layer_types`` (Qwen); ``by-pattern`` has no
    window in every sixth layer (Gemma 3). ``head_dim``: the default; None is hidden size / heads.
    ``tied``: whether the head is the embedding by default. ``decoder``: the module whose
    ``DECODER``, a subclass of ``worker.models.model.Decoder``, computes it.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    window: WindowRule = "none"
    head_dim: int | None = None
    activation: str = "silu"
    tied: bool = False
    decoder: str = "worker.models.model"


OTHERWISE: Final = (
    "vLLM may run it: tidegate engines ensure vllm, and TIDEGATE_WORKER__ENGINE=vllm; or a server"
    " that does, behind the orchestrator (docs/engines.md, Other servers)"
)
"""Advice for a valid model with an unsupported architecture."""

FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(window="every-layer"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window="by-layer"),
    "Qwen3ForCausalLM": Family(qk_norm=True, window="by-layer", head_dim=128),
    "Gemma3ForCausalLM": Family(
        qk_norm=True,
        window="by-pattern",
        head_dim=256,
        activation="gelu_pytorch_tanh",
        tied=True,
        decoder="worker.models.gemma3",
    ),
}
