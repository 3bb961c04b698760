"""Production providers of the published shapes with random weights: their times and bytes without
anybody's weights. ``tiny``: the same code with next to nothing in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clips.render.stages.checkpoint import DTYPES, Precision
from clips.render.stages.clip import ClipCheck
from clips.render.stages.flux import FluxOptions, FluxPortrait
from clips.render.stages.liveportrait.networks import PUBLISHED, Sizes
from clips.render.stages.liveportrait.provider import LivePortraitVideo
from clips.render.stages.liveportrait.weights import make_networks

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPREAD = 0.02
TINY_FACE = Sizes(
    keypoints=5,
    picture=64,
    expansion=4,
    depth=4,
    volume=4,
    residual_blocks=1,
    motion_depths=(1, 1, 1, 1),
    motion_widths=(8, 8, 8, 8),
    flow_expansion=4,
    flow_blocks=2,
    flow_most=16,
    middle_blocks=1,
)
_CLIP_SHAPES = {  # picture's, words' and common width, layers and patch
    "clip-vit-base-patch32": (768, 512, 512, 12, 32),
    "clip-vit-large-patch14": (1024, 768, 768, 24, 14),
}


def liveportrait(
    device: torch.device, precision: Precision, *, tiny: bool = False
) -> LivePortraitVideo:
    sizes = TINY_FACE if tiny else PUBLISHED
    torch.manual_seed(0)
    return LivePortraitVideo(make_networks(sizes, device, DTYPES[precision]), sizes, precision)


def clip(
    device: torch.device, precision: Precision, scratch: Path, *, tiny: bool = False
) -> ClipCheck:
    """CLIP check with OpenAI's ViT-B/32 and ViT-L/14, written to ``scratch`` first."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    folders = []
    for name, (width, words, common, layers, patch) in _CLIP_SHAPES.items():
        if tiny:
            width, words, common, layers = 64, 64, 16, 1
        config = CLIPConfig(
            projection_dim=common,
            text_config={
                "hidden_size": words,
                "intermediate_size": 4 * words,
                "num_attention_heads": words // 64,
                "num_hidden_layers": min(layers, 12),
                "vocab_size": 100 if tiny else 49_408,
                "bos_token_id": 0,
                "eos_token_id": 1,
                "pad_token_id": 1,
            },
            vision_config={
                "hidden_size": width,
                "intermediate_size": 4 * width,
                "num_attention_heads": width // 64,
                "num_hidden_layers": layers,
                "patch_size": patch,
                "image_size": 56 if tiny else 224,
            },
        )
        folder = scratch / name
        model: Any = CLIPModel(config)
        model.to(DTYPES[precision]).save_pretrained(folder)
        _clip_tokenizer(77).save_pretrained(folder)
        pictures = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
        (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
        folders.append(str(folder))
    return ClipCheck(device, folders, precision)


def flux(device: torch.device, options: FluxOptions, *, tiny: bool = False) -> FluxPortrait:
    """FLUX.1-schnell with T5-XXL and CLIP-L. Needs 24 GB on ``device`` before it is quantised, and
    10 GB of the host's memory for the text encoders."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel, T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    pieces += [(letter, -2.0) for letter in _LETTERS]
    wide, deep = (64, 1) if tiny else (4096, 24)
    t5 = T5Config(
        d_model=wide,
        d_ff=160 if tiny else 10_240,
        d_kv=16 if tiny else 64,
        num_heads=4 if tiny else 64,
        num_layers=deep,
        vocab_size=64 if tiny else 32_128,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
    )
    words = CLIPTextConfig(
        hidden_size=64 if tiny else 768,
        intermediate_size=64 if tiny else 3072,
        num_attention_heads=4 if tiny else 12,
        num_hidden_layers=deep // 2 or 1,
        vocab_size=100 if tiny else 49_408,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    shape: dict[str, Any] = {}
    if tiny:
        shape = {
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": wide,
            "pooled_projection_dim": 64,
            "axes_dims_rope": (4, 4, 8),
        }
    channels = (8, 8, 8, 8) if tiny else (128, 256, 512, 512)
    dtype = options.dtype
    none = dict.fromkeys(
        ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae")
    )
    scheduler = FlowMatchEulerDiscreteScheduler()
    pictures = {
        "transformer": _filled(lambda: FluxTransformer2DModel(**shape), device, dtype),
        "vae": _filled(
            lambda: AutoencoderKL(
                sample_size=1024,
                block_out_channels=channels,
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                layers_per_block=1 if tiny else 2,
                latent_channels=16,
                norm_num_groups=2 if tiny else 32,
                use_quant_conv=False,
                use_post_quant_conv=False,
                shift_factor=0.1159,
                scaling_factor=0.3611,
            ),
            device,
            dtype,
        ),
    }
    pooling: Any = CLIPTextModel(words)
    texts = {
        "text_encoder": pooling.to(dtype).eval(),
        "text_encoder_2": _filled(lambda: T5EncoderModel(t5), torch.device("cpu"), dtype),
        "tokenizer": _clip_tokenizer(77),
        "tokenizer_2": T5Tokenizer(vocab=pieces, model_max_length=512, extra_ids=0),
    }
    return FluxPortrait(
        FluxPipeline(scheduler=scheduler, **none | pictures),
        FluxPipeline(scheduler=scheduler, **none | texts),
        device,
        options,
    )


def _filled(make: Callable[[], Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Model with small random weights; on the CPU one value for the large ones, which take
    minutes."""
    with torch.device("meta"):
        model = make().to(dtype)
    model = model.to_empty(device=device).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if device.type == "cuda" or weight.numel() < 1_000_000:
                weight.normal_(std=_SPREAD)
            else:
                weight.fill_(_SPREAD / weight.shape[-1])
    return model


def _clip_tokenizer(length: int) -> Any:
    from transformers import CLIPTokenizer

    words = ["<|startoftext|>", "<|endoftext|>", *_LETTERS, *(f"{each}</w>" for each in _LETTERS)]
    vocab = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=length)
