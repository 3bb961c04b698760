"""Converts a GGUF file's vocabulary to a ``tokenizer.json``, the form used everywhere else.

An original in the file (``tokenizer.huggingface.json``) is used as it is. Else it is built: byte
level BPE (``gpt2``) has merges, and splits text first by a pattern that the file only names; BPE
with scores (``llama``, of SentencePiece) has its merges by the scores.
"""

from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from protocol.gguf import as_text
from worker.errors import TokenizerError, UnsupportedModel
from worker.models.gguf.file import GgufFile

ORIGINAL: Final = "tokenizer.huggingface.json"
_KEY: Final = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens that are matched in a text before it is split."""
_LONGEST: Final = 512
"""Maximum characters of a joined piece; SentencePiece's pieces have at most a few dozen."""
_UNDERLINE: Final = "\u2581"
"""The character that SentencePiece uses for a space."""

_GPT_2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_3: Final = (_WORDS.replace("DIGITS", "{1,3}"),)
_QWEN_2: Final = (_WORDS.replace("DIGITS", ""),)
_SINGLE_DIGITS: Final = (r"\p{N}", _GPT_2)
_DEFAULT: Final = (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]")
PATTERNS: Final[dict[str, tuple[str, ...]]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT_2,),
    "phi-2": (_GPT_2,),
    "olmo": (_GPT_2,),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "lfm2": _LLAMA_3,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
}
"""Patterns that split text, by llama.cpp's names; each applies to the rest left by earlier ones."""


def build_tokenizer(file: GgufFile) -> bytes:
    """Make a ``tokenizer.json`` for the file. Raises ``UnsupportedModel``, ``TokenizerError``."""
    original = file.text(ORIGINAL)
    if original:
        return original.encode()
    kind = file.text(_KEY + "model")
    pieces = file.texts(_KEY + "tokens")
    if not pieces:
        raise TokenizerError(f"{file.path} holds no vocabulary; {_ELSEWHERE}")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(file, pieces)
        elif kind == "llama":
            tokenizer = _with_scores(file, pieces)
        else:
            raise UnsupportedModel(
                f"{file.path}: tokenizer.ggml.model={kind!r} is not read here, only 'gpt2' and"
                f" 'llama'; {_ELSEWHERE}"
            )
        _add_tokens(tokenizer, file, pieces)
        _add_ends(tokenizer, file, pieces)
        return tokenizer.to_str().encode()
    except UnsupportedModel:
        raise
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{file.path}: its vocabulary makes no tokenizer ({error})") from error


_ELSEWHERE: Final = (
    "name a folder with its original tokenizer (tokenizer.json):"
    " TIDEGATE_WORKER__ENGINE_ARGS='tokenizer=FOLDER'"
)


def token_settings(file: GgufFile) -> dict[str, Any]:
    """The texts of ``bos_token`` and others, as ``tokenizer_config.json`` would state them."""
    pieces = file.texts(_KEY + "tokens")
    found = {}
    for name, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        index = file.values.get(f"{_KEY}{key}_token_id")
        if isinstance(index, int) and 0 <= index < len(pieces):
            found[name] = as_text(pieces[index])
    return found


def chat_template(file: GgufFile) -> str:
    """Jinja source of the chat template; empty if the file has none."""
    return file.text("tokenizer.chat_template")


def end_ids(file: GgufFile) -> list[int]:
    """Ids of the tokens that end a text or a turn, according to the file."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.values.get(_KEY + key) for key in keys]
    return [token for token in found if isinstance(token, int)]


def _byte_level(file: GgufFile, pieces: list[str]) -> Tokenizer:
    name = file.text(_KEY + "pre", "default")
    patterns = PATTERNS.get(name)
    if patterns is None:
        raise UnsupportedModel(
            f"{file.path}: how its tokenizer splits text ({_KEY}pre={name!r}) is not known here,"
            f" only {', '.join(sorted(PATTERNS))}; {_ELSEWHERE}"
        )
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [_pair(merge) for merge in file.texts(_KEY + "merges")]
    # Llama 3's tokenizer keeps a word that is a token, regardless of the merges.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=patterns is _LLAMA_3))
    if patterns is _QWEN_2:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    # A piece may begin with a space; no piece is empty.
    left, _, right = merge[1:].partition(" ")
    return merge[0] + left, right


def _with_scores(file: GgufFile, pieces: list[str]) -> Tokenizer:
    scores = file.values.get(_KEY + "scores")
    if not isinstance(scores, list) or len(scores) != len(pieces):
        raise TokenizerError(
            f"{file.path}: {_KEY}scores must have one for each of the {len(pieces)} tokens"
        )
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    stated = file.texts(_KEY + "merges")
    merges = [_pair(merge) for merge in stated] or _merges_by_score(vocabulary, scores)
    unknown = file.values.get(_KEY + "unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            unk_token=pieces[unknown] if isinstance(unknown, int) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = file.flag(_KEY + "add_space_prefix", True)
    blanks = normalizers.Replace(" ", _UNDERLINE)
    begin: list[Any] = [normalizers.Prepend(_UNDERLINE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*begin, blanks])
    end: list[Any] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_UNDERLINE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return tokenizer


def _merges_by_score(vocabulary: dict[str, int], scores: list[Any]) -> list[tuple[str, str]]:
    """Merges in SentencePiece's order: the piece of the highest score first; of the pairs that make
    one piece, the pair of the earliest parts first."""
    merges = []
    for piece, index in vocabulary.items():
        pairs = [
            (vocabulary[piece[:cut]], vocabulary[piece[cut:]], cut)
            for cut in range(1, len(piece) if len(piece) <= _LONGEST else 0)
            if piece[:cut] in vocabulary and piece[cut:] in vocabulary
        ]
        merges += [(-scores[index], *pair, piece) for pair in pairs]
    merges.sort()
    return [(piece[:cut], piece[cut:]) for _, _, _, cut, piece in merges]


def _add_tokens(tokenizer: Tokenizer, file: GgufFile, pieces: list[str]) -> None:
    """Add the tokens that are found in a text before it is split."""
    kinds = file.values.get(_KEY + "token_type")
    if not isinstance(kinds, list):
        return
    tokenizer.add_tokens(
        [
            AddedToken(piece, normalized=False, special=kind == CONTROL)
            for piece, kind in zip(pieces, kinds, strict=False)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )


def _add_ends(tokenizer: Tokenizer, file: GgufFile, pieces: list[str]) -> None:
    """Add the tokens that llama.cpp puts before and after a prompt."""
    # If the file sets nothing, llama.cpp's defaults apply.
    by_default = (
        file.text(_KEY + "model") == "llama" or PATTERNS.get(file.text(_KEY + "pre")) is _LLAMA_3
    )
    parts = ["$A"]
    for key, side, default in (("bos", 0, by_default), ("eos", 1, False)):
        index = file.values.get(f"{_KEY}{key}_token_id")
        if isinstance(index, int) and file.flag(f"{_KEY}add_{key}_token", default):
            parts.insert(side * len(parts), pieces[index])
    if len(parts) > 1:
        ends = [part for part in parts if part != "$A"]
        tokenizer.post_processor = TemplateProcessing(
            single=parts, special_tokens=[(end, pieces.index(end)) for end in dict.fromkeys(ends)]
        )
