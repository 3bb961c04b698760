"""Tiny checkpoints of production providers' architectures, with random weights, as their publishers
lay them out."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from clips.render.stages.liveportrait.networks import NetworkSizes
from clips.render.stages.liveportrait.provider import FILES, make_networks

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
TINY_FACE = NetworkSizes(
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
    flow_compressed=2,
    middle_blocks=1,
    stitching_hidden=(8,),
    lips_hidden=(8,),
    eyes_hidden=(8,),
)
"""LivePortrait at a quarter of its pixels and a fraction of its channels."""


def letters_tokenizer() -> Any:
    """CLIP's tokenizer, of single letters."""
    from transformers import CLIPTokenizer

    words = ["<|startoftext|>", "<|endoftext|>", *_LETTERS, *(f"{each}</w>" for each in _LETTERS)]
    numbers = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=numbers, merges=[], model_max_length=24)


def save_clip(folder: Path, seed: int, image_size: int = 32) -> Path:
    """A CLIP model of some thousand weights."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(seed)
    tokenizer = letters_tokenizer()
    tokenizer.save_pretrained(folder)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = CLIPConfig(
        text_config={
            **tower,
            "num_attention_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 24,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        },
        vision_config={
            **tower,
            "num_attention_heads": 2,
            "image_size": image_size,
            "patch_size": 8,
        },
        projection_dim=8,
    )
    CLIPModel(config).save_pretrained(folder)
    pictures = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    return folder


def save_portrait_networks(folder: Path, sizes: NetworkSizes, *, safetensors: bool = False) -> Path:
    """As they are published: spectral norms in three parts, the small networks wrapped."""
    torch.manual_seed(4)
    networks = make_networks(sizes, torch.device("cpu"), torch.float32)
    for name, network in networks._asdict().items():
        state: dict[str, torch.Tensor] = dict(network.state_dict())
        stem = FILES[name]
        if name == "generator":
            state = {key: part for each in state.items() for key, part in _normed(*each).items()}
        if safetensors:
            if name == "retargeting":
                state = {
                    key.replace(".", "_module.", 1): value.clone() for key, value in state.items()
                }
            folder.mkdir(parents=True, exist_ok=True)
            save_file(state, folder / f"{stem}.safetensors")
            continue
        written: dict[str, object] = {**state}
        where = folder / "liveportrait" / "base_models"
        if name == "retargeting":
            where = where.with_name("retargeting_models")
            written = {
                part: {
                    f"module.{key.removeprefix(f'{part}.')}": value
                    for key, value in state.items()
                    if key.startswith(f"{part}.")
                }
                for part in ("retarget_shoulder", "retarget_mouth", "retarget_eye")
            }
        where.mkdir(parents=True, exist_ok=True)
        torch.save(written, where / f"{stem}.pth")
    return folder


def _normed(key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A convolution's weight as torch's spectral norm keeps it."""
    if not re.search(r"conv_[01s]\.weight$", key):
        return {key: value}
    left, size, right = torch.linalg.svd(value.flatten(1), full_matrices=False)
    # Of norm 3, so that what divides by it must have been looked at.
    scaled = value * (3 / size[0])
    stem = key.removesuffix("weight")
    return {
        f"{stem}weight_orig": scaled,
        f"{stem}weight_u": left[:, 0].contiguous(),
        f"{stem}weight_v": right[0].contiguous(),
    }


def flux_parts(seed: int = 6) -> dict[str, Any]:
    """``FluxPipeline``'s components, of some thousand weights."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        T5Config,
        T5EncoderModel,
        T5Tokenizer,
    )

    torch.manual_seed(seed)
    tokenizer = letters_tokenizer()
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    pieces += [(letter, -2.0) for letter in _LETTERS]
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "tokenizer": tokenizer,
        "tokenizer_2": T5Tokenizer(vocab=pieces, model_max_length=256, extra_ids=0),
        "text_encoder": CLIPTextModel(
            CLIPTextConfig(
                hidden_size=32,
                intermediate_size=64,
                num_attention_heads=4,
                num_hidden_layers=2,
                vocab_size=len(tokenizer),
                max_position_embeddings=24,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=1,
                projection_dim=32,
            )
        ).eval(),
        "text_encoder_2": T5EncoderModel(
            T5Config(
                d_model=32,
                d_ff=64,
                d_kv=8,
                num_heads=4,
                num_layers=2,
                vocab_size=len(pieces),
                feed_forward_proj="gated-gelu",
                is_encoder_decoder=False,
            )
        ).eval(),
        "transformer": FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
        ).eval(),
        "vae": AutoencoderKL(
            sample_size=32,
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=2,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.1159,
            scaling_factor=0.3611,
        ).eval(),
    }


def save_flux(folder: Path) -> Path:
    """In diffusers' layout."""
    from diffusers import FluxPipeline

    FluxPipeline(**flux_parts()).save_pretrained(folder)
    return folder


def save_kokoro(folder: Path) -> Path:
    """Kokoro with as little as its decoder allows: 50 million random weights, of which the sound
    is noise."""
    from kokoro import KModel

    signs = " ,.?!;:abdefhijklmnopstuvwzæðŋɑɔəɛɜɡɪɹʃʊʌʒθˈˌːɾᵻʤʧIWYAOɐɝɚʁ̃"
    config = {
        "n_token": 80,
        "vocab": {sign: number for number, sign in enumerate(signs, 1)},
        "hidden_dim": 512,
        "style_dim": 128,
        "n_layer": 1,
        "max_dur": 4,
        "dropout": 0.0,
        "text_encoder_kernel_size": 3,
        "n_mels": 80,
        "plbert": {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 128,
            "num_hidden_layers": 1,
            "dropout": 0.0,
        },
        "istftnet": {
            "upsample_kernel_sizes": [20, 12],
            "upsample_rates": [10, 6],
            "gen_istft_hop_size": 5,
            "gen_istft_n_fft": 20,
            "resblock_dilation_sizes": [[1, 3, 5]],
            "resblock_kernel_sizes": [3],
            "upsample_initial_channel": 512,
        },
    }
    torch.manual_seed(7)
    (folder / "voices").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({}, folder / "empty.pth")
    model = KModel("hexgrad/Kokoro-82M", str(folder / "config.json"), str(folder / "empty.pth"))
    parts = {name: dict(part.state_dict()) for name, part in model.named_children()}
    wrapped = {
        name: {f"module.{key}": value for key, value in state.items()}
        for name, state in parts.items()
    }
    torch.save(wrapped, folder / "kokoro-v1_0.pth")
    for voice in ("af_heart", "ff_siwis"):
        torch.save(torch.randn(510, 1, 256) * 0.1, folder / "voices" / f"{voice}.pt")
    return folder
