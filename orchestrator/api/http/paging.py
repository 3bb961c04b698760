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
        """The page as OpenAI spells it in JSON; ``shape`` renders each entry."""
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
) -> Page[N]:
    """The page that ``query`` asks for: ``limit`` entries behind the one named by ``after``. Raises
    ``InvalidRequest``."""
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 7 and 1 <= int(limit) <= most):
        raise InvalidRequest(f"limit must be a whole number from 1 to {most}", field="limit")
    begin, end = 0, int(limit)
    if "after" in query:
        names = [entry.id for entry in entries]
        if query["after"] not in names:
            raise InvalidRequest("after names nothing in this list", field="after")
        begin = names.index(query["after"]) + 1
        end += begin
    return Page(entries[begin:end], end < len(entries))
