"""Prompts become token ids with the worker's own tokenizer, so that only ids travel.

Short prompts are encoded at once. Longer ones go to a thread: one thousand characters take about
0.4 ms, and ``encode_batch`` is used there since it releases the interpreter lock where ``encode``
holds it throughout.
"""

import asyncio
import hashlib
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

from orchestrator.chat_template import BadTemplate, ChatTemplate, Refused
from orchestrator.errors import ContextOverflow, InvalidRequest
from orchestrator.task import Message, Prompt
from worker.protocol import ModelCard, block_hashes, prefix_salt
from worker.text.pieces import TokenPieces, token_bytes_of

INLINE_CHARS = 2000
"""Up to this many characters a prompt costs the event loop less than a millisecond."""

INLINE_NAME_TOKENS = 4096
"""Naming the blocks of so many tokens takes the event loop less than half a millisecond."""

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that stand for nothing, in any text (Unicode 15, 23.7)."""

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Templates put a role between halves of special tokens."""

_MESSAGE_CHARS = 16
"""What a message costs the chat template beyond its text, as if in characters."""


class BadCard(ValueError):
    """A model card whose tokenizer cannot be used."""


class Token(NamedTuple):
    """What one token stands for. Part of a character is spelled ``\\xe2\\x80`` in ``text``.

    ``data`` is None where only the tokens beside it would tell its bytes.
    """

    text: str
    data: bytes | None

    @property
    def is_text(self) -> bool:
        """Whether its bytes are characters, none of them in part."""
        return self.data is not None and self.text.encode() == self.data


class PromptEncoder:
    """One model's tokenizer and chat template."""

    def __init__(self, card: ModelCard, executor: Executor) -> None:
        """Takes up to a second for a large vocabulary. Raises ``BadCard``."""
        self.card = card
        self.vocabulary = vocabulary_of(card)
        self._executor = executor
        try:
            self._tokenizer = Tokenizer.from_buffer(card.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise BadCard(f"the tokenizer of {card.model} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        to_bytes = token_bytes_of(self._tokenizer)
        self._pieces = (
            None
            if to_bytes is None
            else TokenPieces(self._tokenizer, to_bytes, frozenset(card.eos_token_ids))
        )
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        self._special = _beginnings(special)
        # Role marks that a model does not call special; in an assistant's turn they may belong.
        marks = [t.content for t in added if not t.special and t.content in card.chat_template]
        self._special_or_mark = _beginnings([*special, *marks])
        self._template: ChatTemplate | None = None
        self.chat_fault = ""
        """Why chats are refused though the model has a template; plain prompts need none."""
        if card.chat_template:
            try:
                self._template = ChatTemplate(card.chat_template)
            except BadTemplate as error:
                self.chat_fault = f"the chat template of {card.model} cannot be read: {error}"
        self.token_text = lru_cache(maxsize=65536)(self._decode_one)
        self.token = lru_cache(maxsize=65536)(self._look_up)

    async def encode(self, prompt: Prompt, *, ids_field: str = "prompt_token_ids") -> Sequence[int]:
        """Token ids of a prompt. Raises ``InvalidRequest`` for one that cannot be encoded.

        ``ids_field`` is where the client has put ids, to name it when they are wrong.
        """
        if not isinstance(prompt, str) and (not prompt or isinstance(prompt[0], int)):
            return self._checked_ids(prompt, ids_field)  # type: ignore[arg-type]  # no Message
        if _cost_chars(prompt) <= INLINE_CHARS:
            return self._encode(prompt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._encode, prompt)

    async def prefix_names(self, token_ids: Sequence[int], cache_salt: str) -> Sequence[bytes]:
        """Names of a prompt's full KV blocks, as this model's workers know them."""
        salt = prefix_salt(self.card.hash_salt, cache_salt)
        if len(token_ids) <= INLINE_NAME_TOKENS:
            return block_hashes(token_ids, self.card.block_tokens, salt)
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, block_hashes, token_ids, self.card.block_tokens, salt
        )

    def text_of(self, ids: Sequence[int]) -> str | None:
        """What ids that continue a prompt stand for, just as workers decode them.

        None where that ends inside a character, or where more than the ids would be needed.
        """
        if self._pieces is None:
            return None
        try:
            return b"".join([self._pieces[token_id] for token_id in ids]).decode()
        except UnicodeDecodeError:
            return None

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            ids = self._ids_of(prompt, add_special_tokens=True)
        else:
            ids = self._chat_ids(prompt)  # type: ignore[arg-type]  # Messages
        if not ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token", field="prompt")
        return ids

    def _ids_of(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= INLINE_CHARS:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def _chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """The template's special tokens are tokens; a client's text that looks like one is text.

        Else a message could end itself and go on as the system (prompt injection by special
        token). Such text is encoded in two parts, broken behind its first character, which a
        tokenizer with a prefix space shows as a space.
        """
        for at, message in enumerate(messages):
            if not _ROLE.fullmatch(message.role):
                raise InvalidRequest(
                    "a role must be 1 to 64 letters, digits, _ or -, for instance user",
                    field=f"messages[{at}].role",
                )
        if not any(self._breaks(message).search(message.content) for message in messages):
            return self._ids_of(self._render(messages), add_special_tokens=False)
        mark = next((c for c in _MARKS if not any(c in m.content for m in messages)), None)
        if mark is None:
            raise InvalidRequest("messages hold every noncharacter there is", field="messages")
        broken = [
            Message(m.role, self._breaks(m).sub(rf"\g<0>{mark}", m.content)) for m in messages
        ]
        parts = self._render(broken).split(mark)
        return [i for part in parts for i in self._ids_of(part, add_special_tokens=False)]

    def _breaks(self, message: Message) -> re.Pattern[str]:
        """Where text that looks like a token of the template begins."""
        return self._special if message.role == "assistant" else self._special_or_mark

    def _render(self, messages: Sequence[Message]) -> str:
        if self._template is None:
            why = self.chat_fault or f"the model {self.card.model!r} has no chat template"
            raise InvalidRequest(f"{why}; send a plain prompt instead", field="messages")
        try:
            return self._template.render(
                [{"role": m.role, "content": m.content} for m in messages],
                self.card.special_tokens,
            )
        except Refused as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from None

    def _checked_ids(self, ids: Sequence[int], field: str) -> Sequence[int]:
        if not ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token", field="prompt")
        if len(ids) >= self.card.context_tokens:  # before the walk, which may be long
            raise ContextOverflow.of_prompt(len(ids), self.card.context_tokens)
        if min(ids) < 0 or max(ids) >= self.card.vocab_size:
            raise InvalidRequest(
                f"token ids must be from 0 to {self.card.vocab_size - 1} for this model",
                field=field,
            )
        return ids

    def _look_up(self, token_id: int) -> Token:
        data = b"" if self._pieces is None else self._pieces[token_id]
        if data:
            return Token(data.decode(errors="backslashreplace"), data)
        text = self.token_text(token_id)  # a special token's, which pieces leave out
        return Token(text, None if "\ufffd" in text else text.encode())

    def _decode_one(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def vocabulary_of(card: ModelCard) -> bytes:
    """A name for what turns a chat into token ids: equal for workers that are interchangeable."""
    parts = (
        card.tokenizer_json,
        card.chat_template.encode(),
        msgspec.json.encode(card.special_tokens),
    )
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def _beginnings(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each of ``tokens`` in a text, also where they overlap.

    A trie: what a character costs grows with the length of tokens, not with their number. A token
    of one character cannot be broken, and is left out.
    """
    root: dict[str, Any] = {}
    for token in tokens:
        node = root
        for char in token if len(token) > 1 else "":
            node = node.setdefault(char, {})
        if node is not root:
            node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        if "" in node:  # the shortest says enough
            return ""
        return "(?:" + "|".join(re.escape(c) + pattern(n) for c, n in sorted(node.items())) + ")"

    first = (f"{re.escape(char)}(?={pattern(node)})" for char, node in sorted(root.items()))
    return re.compile("|".join(first) or "(?!)")


def _cost_chars(prompt: Prompt) -> int:
    """What encoding costs, as the length of a plain prompt that costs the same."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(
        len(part.role) + len(part.content) + _MESSAGE_CHARS
        for part in prompt
        if isinstance(part, Message)
    )
