"""Ends a text whole as its deadline nears (DL-23), for ``on_deadline: finish``. The pace of the
row's own tokens shows when the deadline is near; then the allowed tokens are narrowed:

- without a grammar, the text ends at the next end of a sentence; the last tokens force one. A
  fenced code block is closed first.
- with a grammar, a short path to a matching text is searched in time, and taken once only the
  tokens that it needs are left, by time or ``max_tokens``. Before that, tokens that would leave no
  time for it are excluded, such as a comma that begins another list element. For ``max_tokens``
  this applies to every grammar.

Runs on the thread that makes masks, for every engine that takes masks.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = NDArray[np.uint32]

MARGIN: Final = 4
"""Tokens in reserve for steps that take longer than usual, and for the way back."""
FORCED: Final = 2
"""Tokens that force a sentence to end: a punctuation mark and the end token."""
MIN_WINDOW, MAX_WINDOW = 8, 48
"""Bounds on the window, a quarter of all tokens, in which the next sentence end ends the text."""
MAX_PATH: Final = 256
"""Maximum tokens of a searched path to a matching end."""
_LOOK_AHEAD: Final = 24
"""Tokens left beyond the shortest path below which it is searched again after each token."""
_LOOK_EVERY: Final = 16
_MAX_TRIED, _MAX_TRIED_IN_TEXT = 8, 2
"""Number of tokens to try besides the one that begins the shortest path: each costs a search."""
_MANY: Final = 256
"""Maximum number of tokens that are sorted by length."""
_CANDIDATES: Final = 4096
_MAX_PIECE: Final = 64
"""Maximum bytes of a token that is used to spell a text."""
_MAX_LITERALS, _MAX_SPELLED = 16, 64
"""Maximum number of a grammar's texts tried as a step to its end, and of tries per search."""
_MAX_WORK, _TURN_WORK, _TOKEN_WORK = 1024, 4, 128
"""Maximum saved search steps, the cost of a search by turns, and the steps that each token adds. It
is not a clock, so that a text does not depend on the machine."""
_RUN: Final = 4
"""Repeats of one token that fill a text with a required length; words are shorter."""
_PACE_SMOOTHING: Final = 1 / 8
_SPREADS: Final = 2.0
"""Number of mean deviations that are added to a token's mean time."""
_MAX_GAP: Final = 4.0
"""Gaps longer than this multiple of the usual pace are ignored: the job was paused."""

_FENCE: Final = b"```"
_FENCE_END: Final = b"\n```"
_MARKS: Final = (".", "!", "?", "。", "！", "？")
_SENTENCE_END: Final = re.compile(
    rb"(?:(?<!\d)\.|[!?]|\xe2\x80\xa6|\xe3\x80\x82|\xef\xbc\x81|\xef\xbc\x9f)"
    rb"(?:[\"')\]*_]|\xe2\x80\x9d|\xe2\x80\x99|\xc2\xbb)*\s*\Z"
    rb"|\d\.\s+\Z"
)
"""A mark, with closing quotes and brackets after it. A dot in a number does not count unless a
space follows."""
_STRUCTURE: Final = re.compile(rb"[\"'`<>{}\[\]()|\\\n]")
"""Characters that may end free text within a structure."""
_CLOSERS: Final = re.compile(rb"[\"'\]}>)\s]+")
_SIMPLE: Final = tuple(b': , 0 1 null true false [] {} "" a -'.split())
"""The comma precedes all digits: a number could take more digits forever."""
_PATTERN: Final = re.compile(r'"pattern"\s*:\s*"((?:[^"\\]|\\.)*)"')
_LITERAL: Final = re.compile(r"(?<!\\)([\w ,;:=@/'-]{2,64})[\w ,;:=@/'-]*")
"""The beginning of a long literal is enough: the rest of it is forced."""
_COMMENT: Final = re.compile(r'((^|\n)[ \t]*//.*|\s//[^"/\n]*)(?=\n)')
"""Only in texts of several lines: in a regular expression it may be meant literally."""


class ClosingTables:
    """A vocabulary's tokens that end texts. Computed once per model, on first use."""

    def __init__(self, piece_of: Callable[[int], bytes], vocab_size: int) -> None:
        """``piece_of`` returns a token's text bytes, empty for special tokens."""
        self.piece_of = piece_of
        self._vocab_size = vocab_size

    @cached_property
    def marks(self) -> Words:
        """Bits of the tokens that are a sentence's mark and nothing else [vocabulary / 32]."""
        marks = {mark.encode() for mark in _MARKS}
        return self._words(token for token, piece in self._pieces if piece in marks)

    @cached_property
    def letters(self) -> Words:
        """Bits of the tokens that are only letters, except for a leading space: if most of them may
        come next, the text is free."""
        return self._words(token for token, piece in self._pieces if piece.strip(b" ").isalpha())

    @cached_property
    def structure(self) -> Words:
        """Bits of the tokens that may end free text within a structure."""
        return self._words(token for token, piece in self._pieces if _STRUCTURE.search(piece))

    @cached_property
    def fence_end(self) -> list[int]:
        """The fewest tokens that close a fenced block."""
        return self.spelled(_FENCE_END)

    @cached_property
    def closers(self) -> NDArray[np.int64]:
        """Tokens in the order in which they end a structured text: those that close the most first,
        then the shortest values, then single characters."""
        ranked = []
        for token, piece in self._pieces:
            if _CLOSERS.fullmatch(piece) and not piece.isspace():
                ranked.append((0, -len(piece.strip()), len(piece), token))
            elif piece in _SIMPLE:
                ranked.append((1, _SIMPLE.index(piece), 0, token))
            elif len(piece) == 1 and 0x20 <= piece[0] < 0x7F:
                ranked.append((2 + piece.isspace(), 0, 0, token))
        return np.array([rank[-1] for rank in sorted(ranked)[:_CANDIDATES]], np.int64)

    @cached_property
    def fillers(self) -> NDArray[np.int64]:
        """``closers``, but tokens that end a string come first, then the longest words: for a text
        with a required length."""
        words = sorted((-len(piece), token) for token, piece in self._pieces if piece.isalpha())
        quotes = [token for token in self.closers if self.piece_of(int(token)).startswith(b'"')]
        first = [*quotes, *(token for _, token in words[:_CANDIDATES])]
        return np.array([*first, *self.closers], np.int64)

    @cached_property
    def kinds(self) -> NDArray[np.uint8]:
        """Each token's kind."""
        return np.frombuffer(b"".join(_kind(piece) for _, piece in self._pieces), np.uint8)

    @cached_property
    def _pieces(self) -> list[tuple[int, bytes]]:
        return [(token, self.piece_of(token)) for token in range(self._vocab_size)]

    @cached_property
    def _token_of(self) -> dict[bytes, int]:
        return {piece: token for token, piece in self._pieces if piece}

    def literals(self, source: str) -> list[list[int]]:
        """The last literal texts of a grammar or of a schema's patterns, spelled."""
        if source.startswith("{"):
            source = "\0".join(_PATTERN.findall(source))
        texts = dict.fromkeys(reversed(_LITERAL.findall(_COMMENT.sub("", source))))
        spelled = [self.spelled(text.encode()) for text in islice(texts, _MAX_LITERALS)]
        return [tokens for tokens in spelled if tokens]

    def _words(self, tokens: Iterable[int]) -> Words:
        words = np.zeros(-(-self._vocab_size // 32), np.uint32)
        for token in tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def spelled(self, text: bytes) -> list[int]:
        """``text`` spelled greedily in the longest tokens; empty if that is impossible."""
        found: list[int] = []
        while text:
            ends = range(min(len(text), _MAX_PIECE), 0, -1)
            if not (end := next((end for end in ends if text[:end] in self._token_of), 0)):
                return []
            found.append(self._token_of[text[:end]])
            text = text[end:]
        return found


class Closing:
    """Brings one text to its end by its deadline on ``clock`` and, with a grammar, by
    ``max_tokens``; with an infinite deadline, only by ``max_tokens``."""

    def __init__(
        self,
        tables: ClosingTables,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
        max_tokens: float = math.inf,
        source: str = "",
    ) -> None:
        """``source`` is the text of the grammar."""
        self.has_begun = False
        """Whether the allowed tokens were narrowed because the deadline may be near."""
        self.early_s = 0.0
        """Seconds before the deadline at which the engine cuts an unfinished text."""
        self._tables = tables
        self._deadline = deadline
        self._clock = clock
        self._max_tokens = max_tokens
        self._source = source
        self._text = bytearray()
        self._seen = 0
        self._seen_at = 0.0
        self._token_s = 0.0
        """Usual time of a token; 0 until two have come."""
        self._deviation_s = 0.0
        self._path: list[int] | None = None
        """The rest of the path that is being taken, if any."""
        self._need = MAX_PATH // 8
        """Length in tokens of the shortest path at the last search."""
        self._max_need = 0
        """The maximum of ``_need``: an estimate of the cost of one more element."""
        self._looked_at = -MAX_PATH
        self._look_every = _LOOK_EVERY
        self._way: list[int] | None = None
        """The last path found; None if the search found none."""
        self._work = _MAX_WORK
        """Saved search steps."""
        self._by_turns = False
        """Whether the last path was found by turns."""

    def follow(self, generated: Sequence[int]) -> None:
        """Note the current text: ``generated`` has all of its tokens."""
        made, now = len(generated), self._clock()
        if made == self._seen:
            return
        if made < self._seen:  # a step was taken back
            self._text = bytearray()
            self._seen, self._path = 0, None
        elif self._seen:
            self._pace((now - self._seen_at) / (made - self._seen))
        new = generated[self._seen : made]
        if self._path is not None:
            if list(new) == self._path[: len(new)]:
                del self._path[: len(new)]
            else:
                self._path = None
        for token in new:
            self._text += self._tables.piece_of(token)
        self._work = min(self._work + _TOKEN_WORK * len(new), _MAX_WORK)
        self._seen, self._seen_at = made, now

    def restrict(self, words: Words, end: Words, matcher: "LLMatcher | None") -> None:
        """Remove tokens from ``words`` that would keep the text from ending whole in time; ``end``
        has the end tokens, ``matcher`` the grammar's state."""
        if not end.any():
            return
        left = math.inf
        if self._has_deadline:
            if not self._token_s:
                return
            left_s = self._deadline - self.early_s - self._clock()
            left = left_s / (self._token_s + _SPREADS * self._deviation_s) - MARGIN
        if matcher is not None:
            self._close_grammar(words, end, matcher, min(left, self._max_tokens - self._seen))
        else:
            self._close_text(words, end, left)

    @property
    def _has_deadline(self) -> bool:
        return self._deadline < math.inf

    # ── text ─────────────────────────────────────────────────────────────────────────────────

    def _close_text(self, words: Words, end: Words, left: float) -> None:
        window = min(max((self._seen + left) / 4, MIN_WINDOW), MAX_WINDOW)
        if left > window:
            return
        self.has_begun = True
        if self._path:
            _allow_only(words, self._path[0])
        elif self._text.count(_FENCE) % 2:
            closing = self._tables.fence_end
            if closing and left <= len(closing) + FORCED:
                self._path = list(closing)
                _allow_only(words, closing[0])
        elif self._is_whole():
            words[:] = end
        elif left <= FORCED and self._tables.marks.any():
            words[:] = self._tables.marks

    def _is_whole(self) -> bool:
        tail = self._text[-32:]
        return tail.endswith(_FENCE) or _SENTENCE_END.search(tail) is not None

    # ── grammars ─────────────────────────────────────────────────────────────────────────────

    def _close_grammar(self, words: Words, end: Words, matcher: "LLMatcher", left: float) -> None:
        if self._path is None:
            more = self._max_need if self._has_deadline else self._max_need - self._need
            is_near = left <= self._need + max(_LOOK_AHEAD, more)
            if not is_near and self._seen < self._looked_at + self._look_every:
                return
            if left > MAX_PATH + _LOOK_AHEAD:
                return
            # A failed search takes longest. It is repeated once it is paid for or time runs out.
            wait = 0 if self._work > 0 or self._way is not None else max(left / 2, FORCED)
            if self._seen < self._looked_at + wait:
                return
            self._looked_at = self._seen
            self._way = path = self._known(matcher) or self._shortest(matcher)
            if path is None:  # as while a model thinks: each search costs the longest path
                self._look_every *= 2
                return
            if not (path or self._has_deadline):
                return
            self._need = len(path)
            self._max_need = max(self._max_need, self._need)
            if left > len(path) + FORCED:
                if is_near and path:
                    self._leave_out(words, matcher, path[0], int(left) - FORCED)
                return
            self._path = path
        self.has_begun = self._has_deadline
        if self._path:
            _allow_only(words, self._path[0])
        elif (words & end).any():
            words[:] = words & end

    def _leave_out(self, words: Words, matcher: "LLMatcher", first: int, most: int) -> None:
        """Remove tokens from ``words`` after which the shortest path may take more than ``most``
        tokens in total. ``first`` begins the shortest path from here.

        In free text those are the tokens that may end it; elsewhere, any token. A few are tried.
        """
        tables = self._tables
        is_free = 2 * _count(words & tables.letters) > _count(tables.letters)
        doubtful = words & tables.structure if is_free else words.copy()
        words &= ~doubtful
        _allow(words, first)
        tried = _MAX_TRIED_IN_TEXT if is_free else _MAX_TRIED
        for token in [token for token in self._shortest_first(doubtful) if token != first][:tried]:
            state = matcher.deep_copy()
            if self._work <= 0 or not state.consume_tokens([token]):
                continue
            path = self._end(state, tables.closers, most - 1)
            if path is not None:
                _allow(words, token)

    def _shortest_first(self, words: Words) -> list[int]:
        """The tokens in ``words``, shortest first; if many, only those that close something."""
        tables = self._tables
        if _count(words) > _MANY:
            return [*map(int, _among(tables.closers, words))]
        return sorted(map(int, _tokens(words)), key=lambda token: len(tables.piece_of(token)))

    def _known(self, matcher: "LLMatcher") -> list[int] | None:
        """The last path found, or its tail, if that still leads to an end, as it does within a
        string."""
        for way in (self._way, self._way[1:]) if self._way else ():
            state = matcher.deep_copy()
            if way and state.consume_tokens(way) and state.is_accepting():
                return way
        return None

    def _shortest(self, matcher: "LLMatcher") -> list[int] | None:
        path = self._end(matcher, self._tables.closers)
        if path is None or max((len(list(run)) for _, run in groupby(path)), default=0) < _RUN:
            return path
        return self._end(matcher, self._tables.fillers, len(path) - 1) or path

    def _end(
        self, matcher: "LLMatcher", closers: NDArray[np.int64], most: int = MAX_PATH
    ) -> list[int] | None:
        """A short path from a grammar's state to a possible end, in at most ``most`` tokens; None
        if none is found. It may not be the shortest: it uses the first closers, which may loop
        forever, or turns; what worked before is tried first."""
        for by_turns in (self._by_turns, not self._by_turns):
            found = self._walk(matcher, closers, most, by_turns)
            if found is not None:
                self._by_turns = by_turns
                return found
        return None

    def _walk(
        self, matcher: "LLMatcher", closers: NDArray[np.int64], most: int, by_turns: bool
    ) -> list[int] | None:
        choose: Callable[[LLMatcher, Words], list[int]] = partial(_first, closers)
        if by_turns:
            choose = _Turns(self._tables, closers, self._literals).choose
        state, path = matcher.deep_copy(), list[int]()
        words = np.empty_like(self._tables.letters)
        while len(path) <= most:
            if state.is_accepting() or state.is_stopped():
                return path
            self._work -= _TURN_WORK if by_turns else 1
            taken = state.compute_ff_tokens()
            if not taken:
                if not _fill(state, words):
                    return None
                taken = choose(state, words)
            if not taken or not state.consume_tokens(taken):
                return None
            path += taken
        return None

    @cached_property
    def _literals(self) -> list[list[int]]:
        return self._tables.literals(self._source)

    # ── pace ─────────────────────────────────────────────────────────────────────────────────

    def _pace(self, token_s: float) -> None:
        if not self._token_s:
            self._token_s = token_s
            return
        off = min(token_s, _MAX_GAP * self._token_s) - self._token_s
        self._token_s += _PACE_SMOOTHING * off
        self._deviation_s += _PACE_SMOOTHING * (abs(off) - self._deviation_s)


def _fill(state: "LLMatcher", words: Words) -> bool:
    state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return not state.is_error()


def _first(closers: NDArray[np.int64], state: "LLMatcher", words: Words) -> list[int]:
    """The first allowed token of ``closers``, otherwise any allowed token."""
    allowed = _allowed(words, closers)
    return [int(closers[allowed.argmax()])] if allowed.any() else _tokens(words, 1).tolist()


class _Turns:
    """Takes another kind of token each time that a mask recurs: first tokens that were not allowed
    before it, such as the mark in ``[a-z]+;``, and each time a literal after which the mask is new,
    such as the last word of ``([a-z]+ )+end``."""

    def __init__(
        self, tables: ClosingTables, closers: NDArray[np.int64], literals: list[list[int]]
    ) -> None:
        self._kinds = tables.kinds
        self._closers = closers
        self._literals = literals
        self._before: Words | None = None
        self._times: dict[bytes, int] = {}
        """Number of times that each mask occurred."""
        self._left = _MAX_SPELLED

    def choose(self, state: "LLMatcher", words: Words) -> list[int]:
        new = words if self._before is None else words & ~self._before
        self._before = words.copy()
        mask = words.tobytes()
        turn = self._times.get(mask, 0)
        self._times[mask] = turn + 1
        return self._literal(state, words) or self._turn(turn, words, new)

    def _literal(self, state: "LLMatcher", words: Words) -> list[int]:
        after = np.empty_like(words)
        for literal in self._literals:
            is_allowed = self._left and words[literal[0] // 32] >> literal[0] % 32 & 1
            if not is_allowed or not (then := state.deep_copy()).consume_tokens(literal):
                continue
            self._left -= 1
            if then.is_accepting() or (_fill(then, after) and after.tobytes() not in self._times):
                return literal
        return []

    def _turn(self, turn: int, words: Words, new: Words) -> list[int]:
        fresh = _among(self._closers, new)
        options = np.concatenate((fresh, _among(self._closers, words & ~new)))
        if not options.size and not (options := _tokens(words, _CANDIDATES)).size:
            return []
        kinds, firsts = np.unique(self._kinds[options], return_index=True)
        order = np.lexsort((firsts, kinds > 0xFC, firsts >= fresh.size))
        # One token of each kind, then one of all others, and so on.
        rest = np.delete(options, firsts)
        round_, at = divmod(turn, order.size + bool(rest.size))
        return [int(options[firsts[order[at]]] if at < order.size else rest[round_ % rest.size])]


def _kind(piece: bytes) -> bytes:
    """Digits are one kind, lowercase and uppercase letters two; other characters are their own."""
    if piece[:1].isalpha():
        return b"\xfe" if piece[:1].islower() else b"\xfd"
    return b"\xff" if piece[:1].isdigit() else piece[:1] or b"\0"


def _tokens(words: Words, most: int | None = None) -> NDArray[np.int64]:
    """The first tokens whose bits are set."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits.view(np.bool_))[:most]  # much faster than of numbers


def _among(tokens: NDArray[np.int64], words: Words) -> NDArray[np.int64]:
    """The ``tokens`` whose bits are set."""
    return tokens[_allowed(words, tokens)]


def _allowed(words: Words, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each of ``tokens`` has its bit set."""
    bits: NDArray[np.uint32] = words[tokens // 32] >> (tokens % 32).astype(np.uint32)
    return (bits & 1).astype(np.bool_)


def _count(words: Words) -> int:
    """Number of bits set."""
    return int(np.unpackbits(words.view(np.uint8)).sum())


def _allow(words: Words, token: int) -> None:
    words[token // 32] |= np.uint32(1 << token % 32)


def _allow_only(words: Words, token: int) -> None:
    words[:] = 0
    _allow(words, token)
