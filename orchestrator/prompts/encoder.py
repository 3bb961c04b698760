"""Converts prompts to token ids with the worker's own tokenizer, so that only ids are sent.

Short prompts are encoded at once: 1,000 characters take about 0.4 ms. ``EncodingStage`` encodes
longer prompts in steps. The steps stop when there are more tokens than the model's context.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Self

import msgspec
from tokenizers import Tokenizer

from orchestrator.errors import ContextOverflow, InvalidRequest
from orchestrator.prompts.cuts import Lookalikes, Slicer, unicode_normalizer
from orchestrator.prompts.kinds import INLINE_CHARS, chat_of, is_ids
from orchestrator.prompts.stage import Steps
from orchestrator.prompts.tokens import VocabularyTexts
from orchestrator.prompts.turns import (
    MESSAGE_CHARS,
    OWN_IDS,
    BadTemplate,
    Refused,
    Text,
    chars_of,
    images_of,
    rewritten,
    texts_of,
    tools_of,
    turns_of,
    uses_tools,
    with_end,
    with_own_ids,
    without_later_systems,
)
from orchestrator.tasks.image import Image
from orchestrator.tasks.job import Chat, Message, Prompt, Tool, ToolCall
from protocol import (
    Adapter,
    ImageTokens,
    ModelCard,
    Vision,
    adapter_salt,
    block_hashes,
    excerpt,
    keyed_by_images,
    prefix_salt,
)

if TYPE_CHECKING:
    from orchestrator.prompts.chat_template import ChatTemplate

# Steps have their own threads: in the library's pool, one long text would delay all others.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

INLINE_HASH_TOKENS = 4096
"""Most tokens whose blocks are hashed on the event loop. This takes less than 0.5 ms."""

STEP_CHARS = 16_000
"""Approximate characters per step. A step takes about ten milliseconds."""

_TEXTS_PER_STEP = 4096
"""Short texts per step, such as the keys of a schema. Each takes half a microsecond."""

_LONG_CHARS = 4 * STEP_CHARS
_SEARCH_CHARS = 16 * STEP_CHARS

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters: code points without a meaning in any text (Unicode 15, 23.7)."""

_OPEN_END = chr(0x10FFFF)
"""Another noncharacter. It is appended to the last text if the model continues that text. It also
prevents a template from trimming the text."""

_NOTHING: tuple[Sequence[int], Sequence[int]] = ((), ())

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Pattern of roles. Templates put roles between parts of special tokens."""


WORD: Final = "tidegate-probe"
_ASKED: Final = "tidegate-asks"
PROBE: Final = ToolCall("callprobe", "probe", {"word": WORD}, 64)
"""A sample call, to find out how a template writes calls."""


class BadCard(ValueError):
    """A model card with an unusable tokenizer."""


class PromptEncoder:
    def __init__(self, card: ModelCard, *, special_in_prompts: bool = False) -> None:
        """Takes up to a second for a large vocabulary. ``special_in_prompts``: the text of a plain
        prompt may contain special tokens. Raises ``BadCard``."""
        self.card = card
        self.adapter: Adapter | None = None
        """LoRA adapter for the prompts; None for the model itself."""
        self.vocabulary = vocabulary_of(card)
        self._special_in_prompts = special_in_prompts
        try:
            self._tokenizer = Tokenizer.from_buffer(card.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise BadCard(f"the tokenizer of {card.model} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.tokens = VocabularyTexts(self._tokenizer, card.eos_token_ids)
        spellings = self.tokens.all_bytes()
        self._slicer = Slicer(self._tokenizer, spellings, STEP_CHARS)
        self._around = _added_around(self._tokenizer)
        self._normalize = unicode_normalizer(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder().values()
        # Tokens that are searched for in normalized text must be normalized too.
        special = [
            self._normalized(token.content) if token.normalized else token.content
            for token in added
            if token.special
        ]
        self._special = Lookalikes(special)
        # Role markers that the model does not declare special. Assistant turns may contain them.
        marks = [t.content for t in added if not t.special and t.content in card.chat_template]
        self._special_or_mark = Lookalikes([*special, *marks])
        marks = [mark for mark in OWN_IDS if mark in card.chat_template]
        self._own_ids = OWN_IDS[marks[0]] if marks else None
        self._template, self.chat_fault = _template_of(card)
        """The reason that chats are refused if the model's template is unusable; else empty."""
        self._takes_parts_only = self._template is not None and self._leaves_out_strings()
        self.adapted: Mapping[str, PromptEncoder] = self._adapted()
        """Encoders for the adapters on the card, by name."""

    def reads_as(self, card: ModelCard) -> bool:
        """Whether this encoder gives the same tokens as an encoder for ``card``."""
        own = self.card
        return (
            own.tokenizer_json == card.tokenizer_json
            and own.chat_template == card.chat_template
            and own.special_tokens == card.special_tokens
            and own.eos_token_ids == card.eos_token_ids
            and own.model == card.model
        )

    def with_card(self, card: ModelCard) -> Self:
        """A copy for a ``card`` that it ``reads_as``. Reuses the tokenizer and template."""
        other = copy(self)
        other.card = card
        other.adapted = other._adapted()
        return other

    def _adapted(self) -> "Mapping[str, PromptEncoder]":
        found: dict[str, PromptEncoder] = {}
        for adapter in self.card.adapters:
            found[adapter.name] = other = copy(self)
            other.adapter, other.adapted = adapter, {}
        return found

    @property
    def name(self) -> str:
        return self.card.model if self.adapter is None else self.adapter.name

    @property
    def weights_digest(self) -> str:
        """Identifies the weights for the prompts."""
        added = "" if self.adapter is None else f" {self.adapter.digest}"
        return self.card.model_digest + added

    @property
    def knows_tools(self) -> bool:
        return self.reads("tools")

    def reads(self, argument: str) -> bool:
        """Whether the model's chat template reads a variable of that name."""
        return self._template is not None and argument in self._template.variables

    @cached_property
    def written_call(self) -> str:
        """The template's text for a model's turn that calls ``PROBE``; empty if the template does
        not write the call or refuses such a chat."""
        return self._written(in_text=self._takes_text)

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template accepts calls' arguments only as JSON text: functionary's does."""
        return not self._written(in_text=False) and bool(self._written(in_text=True))

    def _written(self, *, in_text: bool) -> str:
        tool = Tool(PROBE.name, "", {"type": "object", "properties": {"word": {"type": "string"}}})
        result = Message("tool", "done", call_id=PROBE.id, name=PROBE.name)
        messages = (Message("user", _ASKED), Message("assistant", "", calls=(PROBE,)), result)
        try:
            chat = Chat(messages, tools=(tool,), add_generation_prompt=False)
            text = self._render(chat, in_text=in_text)
        except InvalidRequest:
            return ""
        text = text.rpartition(_ASKED)[2]  # the text before may have sample calls
        # Arguments may be in Python's notation.
        return "" if str(PROBE.arguments) in text or WORD not in text else text

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt. Raises ``InvalidRequest`` if it cannot be encoded."""
        if is_ids(prompt):
            return self._checked_ids(prompt)  # type: ignore[arg-type]  # no Message
        steps = self.steps(prompt)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                ids: Sequence[int] = end.value
                return ids

    def steps(self, prompt: Prompt) -> Steps[Sequence[int]]:
        """Encode a text or a chat in steps. Stops early if it does not fit the context."""
        images = images_of(prompt)
        if images:
            self._require_vision(images)
        if isinstance(prompt, str):
            text, around = prompt, self._around
        else:
            text, around = self._render(_with_roles_checked(chat_of(prompt))), _NOTHING
        if around is None:
            yield len(text) > _LONG_CHARS
            ids = self._ids_of(text, add_special_tokens=True)
        else:
            parts = yield from self._parts_of(prompt, text)
            before, behind = around
            ids = [*before]
            chars = 0
            for piece in (piece for part in parts for piece in self._slicer.slices(part)):
                self._require_room(len(ids))
                is_long = len(piece) > _LONG_CHARS
                if is_long or (chars and chars + len(piece) > STEP_CHARS):
                    yield is_long
                    chars = 0
                chars += len(piece)
                ids += self._ids_of(piece)
            ids += behind
        if not ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token", field="prompt")
        self._require_room(len(ids), is_least=False)
        return self._with_images(ids, images) if images else ids

    def hashes_in_steps(
        self, token_ids: Sequence[int], cache_salt: str, images: Sequence[Image] = ()
    ) -> Steps[Sequence[bytes]]:
        """``prefix_hashes`` as work for a thread."""
        yield False
        return self.prefix_hashes(token_ids, cache_salt, images)

    def prefix_hashes(
        self, token_ids: Sequence[int], cache_salt: str, images: Sequence[Image] = ()
    ) -> Sequence[bytes]:
        """The workers' hashes of a prompt's full KV blocks, including its ``images``."""
        added = "" if self.adapter is None else self.adapter.digest
        salt = prefix_salt(adapter_salt(self.card.hash_salt, added), cache_salt)
        vision = self.card.vision
        if images and vision is not None:
            sizes = [ImageTokens(one.digest, _tokens_of(vision, one)) for one in images]
            token_ids = keyed_by_images(token_ids, vision.token_id, sizes)
        return block_hashes(token_ids, self.card.block_tokens, salt)

    def _ids_of(self, text: str, *, add_special_tokens: bool = False) -> Sequence[int]:
        if len(text) <= INLINE_CHARS:
            ids: Sequence[int] = self._tokenizer.encode(
                text, add_special_tokens=add_special_tokens
            ).ids
            return ids
        # Only batches let go of the interpreter's lock.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids = encoding.ids
        return ids

    def _require_room(self, tokens: int, *, is_least: bool = True) -> None:
        if tokens >= self.card.context_tokens:
            raise ContextOverflow.of_prompt(
                tokens, self.card.context_tokens, self.card.context_note, is_least=is_least
            )

    def _parts_of(self, prompt: Prompt, text: str) -> Steps[Sequence[str]]:
        """A prompt's text in parts that are encoded separately, so that a client's text stays text.
        The template's special tokens become tokens. Client text that looks like one must not:
        otherwise a message could end its turn and continue as the system (prompt injection by
        special token). Such text is split after its first character. A tokenizer with a prefix
        space adds a space there."""
        if isinstance(prompt, str):
            if self._special_in_prompts:
                return [text]
            text = self._normalized(text)
            return _split(text, (yield from _starts(self._special, text)))
        chat = chat_of(prompt)
        if self._normalize is not None:
            chat = rewritten(chat, lambda text: self._normalized(text.text))
        broken: dict[Text, list[str]] = {}
        texts = texts_of(chat)
        for at, text_in in enumerate(texts):
            if at % _TEXTS_PER_STEP == _TEXTS_PER_STEP - 1:
                yield False
            lookalikes = self._special if text_in.is_own else self._special_or_mark
            parts = _split(text_in.text, (yield from _starts(lookalikes, text_in.text)))
            if len(parts) > 1:
                broken[text_in] = parts
        if not broken:
            return [text]
        mark = next((c for c in _MARKS if not any(c in t.text for t in texts)), None)
        if mark is None:
            raise InvalidRequest(
                "messages use all Unicode noncharacters, but the service needs one: leave one out",
                field="messages",
            )
        marked = rewritten(chat, lambda text: mark.join(broken.get(text, (text.text,))))
        return self._render(marked).split(mark)

    def _normalized(self, text: str) -> str:
        return text if self._normalize is None else self._normalize(text)

    def _render(self, chat: Chat, *, in_text: bool | None = None) -> str:
        """``in_text``: the arguments of calls are text; None: if the template needs that."""
        if self._template is None:
            why = self.chat_fault or f"the model {self.name!r} has no chat template"
            raise InvalidRequest(f"{why}; send a plain prompt instead", field="messages")
        if uses_tools(chat) and not self.knows_tools:
            raise InvalidRequest(
                f"the chat template of {self.name!r} has no tools; leave them out, or use another "
                "model",
                field="tools" if chat.tools else "messages",
            )
        if self._own_ids is not None:
            chat = with_own_ids(chat, self._own_ids)
        messages = chat.messages
        is_open = messages[-1].is_open
        if is_open:
            messages = (*messages[:-1], with_end(messages[-1], _OPEN_END))
        has_images = any(message.parts for message in messages)
        if in_text is None:
            in_text = any(message.calls for message in messages) and self._takes_text
        turns = turns_of(messages, in_parts=has_images or self._takes_parts_only, in_text=in_text)
        try:
            text = self._template.render(
                turns,
                self.card.special_tokens,
                add_generation_prompt=chat.add_generation_prompt and not is_open,
                arguments=chat.template_arguments,
                tools=tools_of(chat),
                chars=chars_of(chat, MESSAGE_CHARS),
            )
            if not is_open:
                return text
            # Text that the template adds after the message would end it.
            text, end, _ = text.rpartition(_OPEN_END)
            if not end:
                raise Refused("it drops the last message, which the model must continue")
            return text
        except Refused as error:
            allowed = without_later_systems(chat)
            if allowed is not chat:
                return self._render(allowed, in_text=in_text)
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {excerpt(error, 200)}",
                field="messages",
            ) from None

    def _require_vision(self, images: Sequence[Image]) -> Vision:
        """How the model reads images. Raises ``InvalidRequest`` if it cannot read these images."""
        vision = self.card.vision
        if vision is None:
            raise InvalidRequest(
                f"the model {self.name!r} reads text only, no images: leave them out, or use a "
                "model on an instance that supports images (see lacks in /v2/instances)",
                field="messages",
            )
        size = sum(len(image.data) for image in images)
        if size > vision.max_bytes:
            raise InvalidRequest(
                f"the images have {size} bytes together, but the model's workers accept at most "
                f"{vision.max_bytes}: send fewer or smaller ones",
                field="messages",
            )
        return vision

    def _with_images(self, ids: Sequence[int], images: Sequence[Image]) -> Sequence[int]:
        """A prompt's tokens, with the model's number of tokens for each image. Raises
        ``InvalidRequest`` or ``ContextOverflow``."""
        vision = self._require_vision(images)
        places = ids.count(vision.token_id)
        if places != len(images):
            raise InvalidRequest(
                f"the chat template of {self.name!r} has {places} places for the "
                f"{len(images)} images of these messages; send them in the user's turns",
                field="messages",
            )
        counts = [_tokens_of(vision, image) for image in images]
        total = len(ids) - places + sum(counts)
        self._require_room(total, is_least=False)  # before so many tokens are made
        left = iter(counts)
        return [
            token
            for one in ids
            for token in ([one] * next(left) if one == vision.token_id else (one,))
        ]

    def _leaves_out_strings(self) -> bool:
        """Whether the template renders the content of a turn only if it is a list of parts."""
        assert self._template is not None
        said = Message("user", "Tide?")
        shown: list[bool] = []
        for in_parts in (False, True):
            try:
                turns = turns_of([said], in_parts=in_parts)
                shown.append(said.content in self._template.render(turns, self.card.special_tokens))
            except Refused:
                shown.append(False)
        return shown == [False, True]

    def _checked_ids(self, ids: Sequence[int]) -> Sequence[int]:
        if not ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token", field="prompt")
        self._require_room(len(ids), is_least=False)  # before min and max, which may take long
        if not 0 <= min(ids) <= max(ids) < self.card.vocab_size:
            raise InvalidRequest(
                f"token ids must be from 0 to {self.card.vocab_size - 1} for this model",
                field="prompt",
            )
        return ids


def vocabulary_of(card: ModelCard) -> bytes:
    """A digest of tokenizer, template and special tokens. Interchangeable workers have the same."""
    parts = (
        card.tokenizer_json,
        card.chat_template.encode(),
        msgspec.json.encode(card.special_tokens),
    )
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def _tokens_of(vision: Vision, image: Image) -> int:
    try:
        return vision.tokens_of(image.width, image.height)
    except ValueError as error:
        raise InvalidRequest(
            f"an image of {image.width}x{image.height} pixels cannot be read: {error}",
            field="messages",
        ) from None


def _with_roles_checked(chat: Chat) -> Chat:
    for at, message in enumerate(chat.messages):
        if not _ROLE.fullmatch(message.role):
            raise InvalidRequest(
                "a role must be 1 to 64 letters, digits, _ or -, such as user",
                field=f"messages[{at}].role",
            )
    return chat


def _starts(lookalikes: Lookalikes, text: str) -> Steps[list[int]]:
    starts: list[int] = []
    for begin in range(0, len(text), _SEARCH_CHARS):
        if begin:
            yield False
        starts += lookalikes.starts(text, begin, begin + _SEARCH_CHARS)
    return starts


def _split(text: str, starts: Iterable[int]) -> list[str]:
    """Parts that end after the character at each of ``starts``."""
    ends = [0, *(start + 1 for start in starts), len(text)]
    return [text[begin:end] for begin, end in pairwise(ends)]


def _template_of(card: ModelCard) -> "tuple[ChatTemplate | None, str]":
    """The model's chat template, or the reason that it is unusable."""
    if not card.chat_template:
        return None, ""
    from orchestrator.prompts.chat_template import ChatTemplate  # with Jinja, on a thread

    try:
        return ChatTemplate(card.chat_template), ""
    except BadTemplate as error:
        return None, f"the chat template of {card.model} cannot be read: {error}"


def _added_around(tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]] | None:
    """The ids that are added before and after a plain prompt's ids; None if that is unclear."""
    own, whole = (
        tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True)
    )
    for at in range(len(whole) - len(own) + 1 if own else 0):
        if whole[at : at + len(own)] == own:
            return whole[:at], whole[at + len(own) :]
    return None
