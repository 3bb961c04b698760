"""The demo model's tokenizer: BPE over raw characters with byte fallback, and the chat format.

Why not the usual "▁" or "Ġ" trick: a plain space stays a space inside the tokens, nothing is
normalised, and no prefix space is added. So ``decode(encode(text)) == text`` holds for every
string, and decoding a suffix of the ids never eats a leading space. A character outside the
alphabet falls back to its UTF-8 bytes, ``<0x00>`` to ``<0xFF>``, which are ordinary entries of the
BPE vocabulary and not added tokens: a user who types "<0x41>" gets six characters, not a byte.

Chat format, without any newline of its own::

    <|bos|><|system|>text<|end|><|user|>text<|end|><|assistant|>text<|end|>

A plain document is ``<|bos|>text<|endoftext|>``; training drops its ``<|bos|>`` now and then, so a
prompt works with and without it. The tokenizer itself adds no special token: the chat template
writes ``<|bos|>``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS: Final = "<|bos|>"
END_OF_TEXT: Final = "<|endoftext|>"
END: Final = "<|end|>"
SPECIALS: Final = (BOS, END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", END)
_BYTES: Final = tuple(f"<0x{value:02X}>" for value in range(256))
# Words and marks keep one leading space; digits stand alone, which makes sums learnable.
_PIECES: Final = r" ?\p{L}+| ?\p{N}|\n+| ?[^\s\p{L}\p{N}]+|\s"
_PRINTABLE: Final = [chr(code) for code in range(32, 127)] + ["\n"]

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] | trim + '\\n\\n' }}"
    "{% set messages = messages[1:] %}"
    "{% endif %}"
    "{{ 'You may call these tools:\\n<tools>\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{{ '</tools>\\nA call is written as:\\n<tool_call>\\n'"
    ' + \'{"name": <its name>, "arguments": <an object>}\''
    " + '\\n</tool_call><|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' and message['tool_call_id'] %}"
    "{{ '<|user|><tool_response>\\n' + message['content'] | trim + '\\n</tool_response><|end|>' }}"
    "{% elif message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']"
    " + '; expected system, user or assistant') }}"
    "{% elif message['tool_calls'] %}"
    "{{ '<|assistant|>' + message['content'] | trim }}"
    "{% for call in message['tool_calls'] %}"
    "{{ '\\n' if message['content'] | trim or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": ' + call['function']['name'] | tojson }}"
    "{{ ', \"arguments\": ' + call['function']['arguments'] | tojson + '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Calls in Hermes' format, which the model never saw: a grammar makes it write them."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of at most `vocab_size` entries from `texts`.

    Ids are laid out as: the special tokens, the 256 bytes, the alphabet, then the merges.
    """
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    learner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIALS) - len(_BYTES),
            initial_alphabet=_PRINTABLE,
            limit_alphabet=len(_PRINTABLE),
            show_progress=False,
        ),
    )
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    vocab = {piece: index for index, piece in enumerate((*SPECIALS, *_BYTES, *pieces))}
    merges = [(left, right) for left, right in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = learner.pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; `context` is in tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
