"""Makes linear layers of four bits (NF4, arXiv 2305.14314) while loading, by bitsandbytes."""

from typing import Any

import torch

from clips.render.stages.checkpoint import not_installed


def quantise(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace each linear layer of ``module`` by one of 4.13 bits a weight on ``device`` that
    computes in ``dtype``, one after the other, so that the module is never in memory twice.

    Raises ``LoadError`` without bitsandbytes.
    """
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        raise not_installed("flux in nf4", "slot-flux", error) from None
    for name, layer in list(module.named_modules()):
        if type(layer) is not torch.nn.Linear:
            continue
        small: Any = Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=dtype,
            quant_type="nf4",
            compress_statistics=True,
            device="meta",
        )
        small.weight = Params4bit(
            layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
        )
        small.bias = layer.bias
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, small.to(device))
