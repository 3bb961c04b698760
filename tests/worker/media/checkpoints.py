"""Tiny checkpoints of production providers' architectures, with random weights, as their publishers
lay them out."""

import json
from pathlib import Path

import torch

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def save_bpe_tokenizer(folder: Path, length: int) -> int:
    """CLIP's kind of tokenizer, of single letters; returns how many tokens it has."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = [*_LETTERS, *(f"{letter}</w>" for letter in _LETTERS)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters]
    tokenizer = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            [],
            unk_token="<|endoftext|>",
            end_of_word_suffix="</w>",
        )
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.RobertaProcessing(
        ("<|endoftext|>", 1), ("<|startoftext|>", 0)
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(words)


def save_clip(folder: Path, seed: int, image_size: int = 32) -> Path:
    """A CLIP model of some thousand weights."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(seed)
    tokens = save_bpe_tokenizer(folder, 24)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = CLIPConfig(
        text_config={
            **tower,
            "num_attention_heads": 2,
            "vocab_size": tokens,
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
