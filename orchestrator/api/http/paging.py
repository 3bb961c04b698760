"""Lists that a client reads page by page, by the id of the last entry it has."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from orchestrator.errors import InvalidRequest


class ListEntry(Protocol):
    """An entry of a list."""

    @property
    def id(self) -> str: ...


N = TypeVar("N", bound=ListEntry)


class Page(NamedTuple, Generic[N]):
    """Some entries of a list, in its order."""

    entries: Sequence[N]
    has_more: bool

    def body(self, shape: Callable[[N], object]) -> dict[str, object]:
        """The page as OpenAI and Anthropic spell it in JSON; ``shape`` renders each entry."""
        return {
            "object": "list",
            "data": [shape(entry) for entry in self.entries],
            "first_id": self.entries[0].id if self.entries else None,
            "last_id": self.entries[-1].id if self.entries else None,
            "has_more": self.has_more,
        }


def page_of(
    entries: Sequence[N],
    query: Mapping[str, str],
    *,
    most: int,
    default: int = 20,
    after: str = "after",
    before: str = "before",
) -> Page[N]:
    """The page that ``query`` asks for: ``limit`` entries behind the one named by ``after``, or the
    last ones ahead of the one named by ``before``. Raises ``InvalidRequest``."""
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 7 and 1 <= int(limit) <= most):
        raise InvalidRequest(f"limit must be a whole number from 1 to {most}", field="limit")
    count, begin, end = int(limit), 0, len(entries)
    if after in query:
        begin = _place(entries, query, after) + 1
    if before in query:
        end = _place(entries, query, before)
        if after not in query:
            return Page(entries[max(0, end - count) : end], end > count)
    return Page(entries[begin : min(begin + count, end)], begin + count < end)


def _place(entries: Sequence[N], query: Mapping[str, str], field: str) -> int:
    for place, entry in enumerate(entries):
        if entry.id == query[field]:
            return place
    raise InvalidRequest(f"{field} names nothing in this list", field=field)
