"""A call with arguments that are almost JSON, in Gemma's format: keys have no quotes, and strings
have special quotes, so that nothing in them is escaped::

    call:NAME{city:<|"|>Köln<|"|>,days:3,tags:[<|"|>a<|"|>],near:{km:1.5}}

Text is converted to JSON as soon as it is certain. Only the end shows whether it is an object.
"""

import json
from typing import Final

import msgspec

from orchestrator.parsing.json_call import MAX_SHORT, MarkedCall, Wrong
from orchestrator.parsing.markers import begun
from orchestrator.parsing.tagged_call import as_json

_CLOSES: Final = {"{": "}", "[": "]"}
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BareCall(MarkedCall):
    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote
        self._open = ""
        """The open brackets, innermost last."""
        self._whole: list[str] = []
        self._value = ""
        """The part of a string that is held back."""

    def _begin(self, text: str, at: int) -> int:
        at, mark = self._tag(text, at, ("call:",))
        if mark:
            self._read = self._in_name
        return at

    def _in_name(self, text: str, at: int) -> int:
        at, name = self._word_up_to(text, at, "{")
        if name is not None:
            self.name = self._checked(name, at)
            self._read = self._outside
        return at

    def _outside(self, text: str, at: int) -> int:
        """Read one character outside a string."""
        mark = text[at]
        if mark == self._quote[0]:
            self._read = self._opens
            return at
        at += 1
        if mark in _CLOSES:
            self._tell(mark)
            self._open += _CLOSES[mark]
        elif mark in "}],:":
            self._end_word(is_key=mark == ":")
            self._tell(f"{mark} " if mark in ",:" else mark)
            if mark in "}]":
                if not self._open.endswith(mark):
                    raise Wrong(at)
                self._open = self._open[:-1]
        else:
            self._word += mark
            if len(self._word) > MAX_SHORT:
                raise Wrong(at)
        if not self._open:
            self._check(at)
        return at

    def _opens(self, text: str, at: int) -> int:
        at, mark = self._tag(text, at, (self._quote,))
        if mark:
            self._tell('"')
            self._read = self._in_string
        return at

    def _in_string(self, text: str, at: int) -> int:
        value = self._value + text[at:]
        end = value.find(self._quote)
        certain = len(value) - begun(value, self._quote) if end < 0 else end
        self._tell(json.dumps(value[:certain], ensure_ascii=False)[1:-1])
        if end < 0:
            self._value = value[certain:]
            return len(text)
        at += end + len(self._quote) - len(self._value)
        self._value = ""
        self._tell('"')
        self._read = self._outside
        return at

    def _end_word(self, *, is_key: bool) -> None:
        word, self._word = self._word.strip(), ""
        if word:
            self._tell(json.dumps(word, ensure_ascii=False) if is_key else as_json(word, set()))

    def _tell(self, text: str) -> None:
        self._whole.append(text)
        self._untold += text

    def _check(self, at: int) -> None:
        try:
            _decode("".join(self._whole))
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            raise Wrong(at) from None
        self.is_over = True
