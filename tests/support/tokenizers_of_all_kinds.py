"""Small tokenizers of the kinds that large models have, trained on the spot."""

from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _corpus() -> list[str]:
    root = Path(__file__).parents[2]
    return [
        # A text that does not change; long runs of blanks would become tokens of their own.
        *(" ".join(part.split()) for part in (root / "LICENSE").read_text("utf-8").split("\n\n")),
        "那是很久以前，有一只小老虎。它喜欢喝茶！ " * 20,
        "naïve café über " * 20,
    ]


@cache
def byte_level() -> Tokenizer:
    """As Llama 3, Qwen and GPT-4 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_GPT4), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """As Llama 2 and Mistral have it: one text is one word, with a space before it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = BpeTrainer(
        vocab_size=1500,
        max_token_length=16,  # a text this small would have whole sentences as tokens
        special_tokens=["<unk>", "<s>", "</s>", *_BYTES],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@cache
def demo() -> Tokenizer:
    """The demo model's own."""
    checkpoint = Path(__file__).parents[2] / "worker/demo_model/checkpoint"
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
