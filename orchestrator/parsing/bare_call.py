"""A call with arguments that are almost JSON, in Gemma's format: keys have no quotes, and strings
have special quotes, so that nothing in them is escaped::

    call:NAME{city:<|"|>Köln<|"|>,days:3,tags:[<|"|>a<|"|>],near:{km:1.5}}

Text is converted to JSON as soon as it is certain. Only the end shows whether it is an object.
"""

import json
from typing import Final

import msgspec

from orchestrator.parsing.json_call import MAX_SHORT, MarkedCall, Reading, Wrong
from orchestrator.parsing.markers import begun
from orchestrator.parsing.tagged_call import as_json

QUOTE: Final = '<|"|>'
_CLOSES: Final = {"{": "}", "[": "]"}
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BareCall(MarkedCall):
    def __init__(self) -> None:
        super().__init__()
        self._told: list[str] = []

    def _whole(self) -> Reading[None]:
        yield from self._tag("call:")
        self.name = yield from self._name_up_to("{")
        open_brackets, word = "", ""
        while True:
            mark = yield from self._char()
            if mark == QUOTE[0]:
                yield from self._string()
                continue
            self._at += 1
            if mark in _CLOSES:
                self._tell(mark)
                open_brackets += _CLOSES[mark]
            elif mark in "}],:":
                if word := word.strip():
                    key = json.dumps(word, ensure_ascii=False)
                    self._tell(key if mark == ":" else as_json(word, set()))
                self._tell(f"{mark} " if mark in ",:" else mark)
                word = ""
                if mark in "}]":
                    if not open_brackets.endswith(mark):
                        raise Wrong(self._at)
                    open_brackets = open_brackets[:-1]
            else:
                word += mark
                if len(word) > MAX_SHORT:
                    raise Wrong(self._at)
            if not open_brackets:
                break
        try:
            _decode("".join(self._told))
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            raise Wrong(self._at) from None

    def _string(self) -> Reading[None]:
        yield from self._tag(QUOTE)
        self._tell('"')
        value, end = "", -1
        while end < 0:
            yield from self._char()
            value += self._text[self._at :]
            self._at = len(self._text)
            end = value.find(QUOTE)
            certain = len(value) - begun(value, QUOTE) if end < 0 else end
            self._tell(json.dumps(value[:certain], ensure_ascii=False)[1:-1])
            value = value[certain:]
        self._at -= len(value) - len(QUOTE)
        self._tell('"')

    def _tell(self, text: str) -> None:
        self._told.append(text)
        self._untold += text
