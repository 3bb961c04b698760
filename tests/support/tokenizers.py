"""Small tokenizers of every family, made on the spot."""

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from worker.text import Tokenizer as OurTokenizer

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café → 東京 🙂",
    "stop STOP\n\nUser:",
]
SPECIAL = "<|end|>"


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: every byte is a printable character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(
            vocab_size=330,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return _with_added(tokenizer)


def sentencepiece() -> Tokenizer:
    """Llama 2, Mistral: "▁" for a space, bytes as ``<0x..>``."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("▁", "▁the", "▁fox", "the", "fox", "s", "e", "t", "▁▁", "é", "東", "🙂", "\n"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with_added(tokenizer)


def metaspace() -> Tokenizer:
    """T5-like: "▁" for a space and nothing else."""
    tokenizer = Tokenizer(models.WordLevel({"▁the": 0, "▁fox": 1, "es": 2, "?": 3}, unk_token="?"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return _with_added(tokenizer)


def word_piece() -> Tokenizer:
    """BERT: its decoder puts spaces between words, which no join of pieces can do."""
    vocab = {"the": 0, "fox": 1, "##es": 2, "jump": 3, "##s": 4, ",": 5, "?": 6}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="?"))
    tokenizer.decoder = decoders.WordPiece()
    return _with_added(tokenizer)


def ours(library: Tokenizer, silent: tuple[int, ...] = ()) -> OurTokenizer:
    return OurTokenizer(library.to_str().encode(), {}, "", silent)


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.add_tokens([AddedToken("→x", normalized=False)])
    return tokenizer


ALL = {f.__name__: f() for f in (byte_level, sentencepiece, metaspace, word_piece)}
