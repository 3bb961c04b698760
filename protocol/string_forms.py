"""Forms of strings that llguidance knows too loosely, as patterns.

It takes 29 February of any year for a date, second 60 of any minute for a time, host names that RFC
5890 keeps for encoded ones or that are too long, and more than 64 characters before an address's @.
A pattern may leave out what is rare (leap seconds, names of more than 253 characters in five parts,
addresses at a number), and lets nothing through that is wrong.
"""

from typing import Any, Final

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_FIRST, _ANY = "[A-Za-z0-9]", "[A-Za-z0-9-]"


def _label(most: int) -> str:
    """A part of a host name: no hyphen at its ends, nor as both its third and fourth letter."""
    third = f"{_ANY}{_FIRST}(?:{_ANY}{{0,{most - 4}}}{_FIRST})?"
    fourth = f"{_ANY}-{_FIRST}(?:{_ANY}{{0,{most - 5}}}{_FIRST})?"
    return f"{_FIRST}(?:{_FIRST}|{third}|{fourth})?"


_HOST = rf"{_label(61)}(?:\.{_label(63)}){{0,3}}"
_MAIL = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_BOX = (
    rf"(?:{_MAIL}{{1,64}}|{_MAIL}{{1,31}}\.{_MAIL}{{1,32}}"
    rf"|{_MAIL}{{1,20}}(?:\.{_MAIL}{{1,21}}){{2}}|{_MAIL}{{1,16}}(?:\.{_MAIL}{{1,15}}){{3}})"
)
"""At most 64 characters in up to four parts."""

PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": f"^{_HOST}$",
    "email": f"^{_BOX}@{_HOST}$",
}
"""Patterns by the name of the format. A host name has at most 61 + 3 · 64 = 253 characters."""


def with_forms(schema: Any, *, values: tuple[str, ...]) -> Any:
    """A copy of ``schema`` with these formats as patterns; ``values`` are keywords with values that
    are no schemas."""
    if isinstance(schema, list):
        return [with_forms(one, values=values) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: value if key in values else with_forms(value, values=values)
        for key, value in schema.items()
    }
    form = kept.get("format")
    if not isinstance(form, str) or form not in PATTERNS:
        return kept
    if form == "email" and "pattern" in kept:  # both take the library more work than it may do
        return kept
    del kept["format"]
    pattern = {"pattern": PATTERNS[form]}
    if "pattern" not in kept:
        return kept | pattern
    others = kept.get("allOf")
    return kept | {"allOf": [*(others if isinstance(others, list) else ()), pattern]}
