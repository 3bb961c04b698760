"""Small random checkpoints, written by transformers as a real one would be."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.lazy import transformers

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
    """A model with random weights and a byte tokenizer. ``changes`` go into its configuration."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(TINY | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is left out
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.15)
    model.save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġthe", "Ġfox", "Ġruns"]
    vocab = {piece: i + 3 for i, piece in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def edit_config(path: Path, **changes: object) -> None:
    """Change ``config.json``; a value of None removes the setting."""
    file = path / "config.json"
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
