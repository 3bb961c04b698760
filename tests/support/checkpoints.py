"""Small random checkpoints, as transformers writes them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.lazy import transformers
from tests.support.pictures import IMAGE_TEMPLATE

DEMO = Path(__file__).parents[2] / "worker" / "demo_model" / "checkpoint"

TINY = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
ROPE = {"rope_theta": 500.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE = ROPE | {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_checkpoint(path: Path, model_type: str = "llama", **changes: object) -> Path:
    """A model with random weights and a byte tokenizer. ``changes`` go into its configuration.

    The plain Llama is written without transformers, which takes seconds to import.
    """
    torch.manual_seed(0)
    if model_type == "llama" and not changes:
        weights = {name: torch.empty(shape) for name, shape in _llama_shapes().items()}
        _draw(weights)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(_LLAMA | TINY))
        ends = {name: TINY[name] for name in ("bos_token_id", "eos_token_id")}
        (path / "generation_config.json").write_text(json.dumps(ends))
    else:
        config = transformers.AutoConfig.for_model(model_type, **(TINY | changes))
        model = transformers.AutoModelForCausalLM.from_config(config)
        _draw(dict(model.named_parameters()))
        model.save_pretrained(path)
    _save_tokenizer(path)
    return path


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
}


def _llama_shapes() -> dict[str, tuple[int, ...]]:
    vocabulary, hidden, intermediate, layers, heads, kv_heads, dim = list(TINY.values())[:7]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        of_layer = {
            "self_attn.q_proj": (heads * dim, hidden),
            "self_attn.k_proj": (kv_heads * dim, hidden),
            "self_attn.v_proj": (kv_heads * dim, hidden),
            "self_attn.o_proj": (hidden, heads * dim),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": of_layer[name] for name in of_layer}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def make_adapter(
    path: Path, base: Path, modules: Sequence[str], rank: int = 4, seed: int = 1, **changes: object
) -> Path:
    """A LoRA adapter with random weights, as PEFT writes it, for the ``modules`` of all layers of a
    checkpoint. ``changes`` go into its configuration."""
    torch.manual_seed(seed)
    weights = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.removesuffix(".weight").rpartition(".")[2] in modules:
            outputs, inputs = weight.shape
            factor = f"base_model.model.{name.removesuffix('.weight')}.lora"
            weights[f"{factor}_A.weight"] = torch.empty(rank, inputs).normal_(0, 0.3)
            weights[f"{factor}_B.weight"] = torch.empty(outputs, rank).normal_(0, 0.3)
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config |= {"target_modules": list(modules), "base_model_name_or_path": str(base)}
    (path / "adapter_config.json").write_text(json.dumps(config | changes))
    return path


def merge_adapter(path: Path, base: Path, adapter: Path) -> Path:
    """The checkpoint that an adapter of ``make_adapter`` makes of its base."""
    shutil.copytree(base, path)
    weights = load_file(base / "model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, weight in weights.items():
        factor = f"base_model.model.{name.removesuffix('.weight')}.lora"
        if f"{factor}_A.weight" in factors:
            added = factors[f"{factor}_B.weight"] @ factors[f"{factor}_A.weight"]
            weight += added * config["lora_alpha"] / config["r"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def _draw(weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, weight in weights.items():
            if "norm" in name:  # ones would hide a norm that is left out
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.15)


def _save_tokenizer(path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġthe", "Ġfox", "Ġruns"]
    vocab = {piece: i + 3 for i, piece in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


def edit_config(path: Path, **changes: object) -> None:
    """Change ``config.json``; a value of None removes the setting."""
    file = path / "config.json"
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


def make_vision_checkpoint(path: Path, **changes: object) -> Path:
    """A LLaVA with random weights, 16 tokens for each image. ``changes`` go into the configuration
    of its text model."""
    torch.manual_seed(0)
    ids = _save_image_tokenizer(path)
    text = TINY | {"max_position_embeddings": 512} | changes
    tower = VISION | {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "projection_dim": 8, **tower},
        text_config={"model_type": "llama", **text},
        image_token_index=ids["<|image|>"],
        vision_feature_layer=-1,
    )
    square = {"height": 32, "width": 32}
    images = {"image_processor_type": "CLIPImageProcessor", "crop_size": square}
    images |= {"size": {"shortest_edge": 32}}
    model = transformers.AutoModelForImageTextToText.from_config(config)
    _draw(dict(model.named_parameters()))
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(images))
    return path


def _save_image_tokenizer(path: Path) -> dict[str, int]:
    """A token per byte, and those of images; returns the ids of all."""
    _save_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|see|>", "<|image|>", "<|seen|>", "<|video|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    named = {"image_token": "<|image|>", "video_token": "<|video|>"}
    settings = {"chat_template": IMAGE_TEMPLATE, "extra_special_tokens": named}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return vocabulary
