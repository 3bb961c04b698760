"""Batches as their clients see them: what was sent, what came back, and what is wrong with it."""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

_URL: Final = "/v1/completions"
_PROMPT: Final = "Once upon a time"
_MAX_TOKENS: Final = 4
_RETRY_S: Final = 0.1
AWAY: Final = (aiohttp.ClientError, TimeoutError)
"""Errors that a client sees of a service that is down."""


def request_body(max_tokens: int = _MAX_TOKENS) -> dict[str, Any]:
    """Body of a short completion."""
    return {"model": "demo", "prompt": _PROMPT, "max_tokens": max_tokens}


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """A batch to send. ``key`` is the token of its client."""

    name: str
    lines: int
    key: str
    refused_every: int = 50
    """Each line whose number is a multiple of this is one that the service always refuses."""

    def ids(self) -> dict[str, str]:
        """Custom ids of all lines, with the kind of entry that each must have once served."""
        numbers = range(1, self.lines + 1)
        kinds = ("errored" if n % self.refused_every == 0 else "succeeded" for n in numbers)
        return dict(zip((f"{self.name}-{n}" for n in numbers), kinds, strict=True))


@dataclass(slots=True)
class Sent:
    """An order that was sent, and its outcome."""

    order: BatchOrder
    id: str
    input_id: str
    state: dict[str, Any] = field(default_factory=dict)
    """The batch as the service told it last."""
    entries: Counter[str] = field(default_factory=Counter)
    """Number of entries by kind: succeeded, errored."""
    missing: int = 0
    doubled: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"/v1/batches/{self.id}"

    @property
    def done(self) -> int:
        """Number of lines that had an entry at the last look."""
        counts = self.state.get("request_counts", {})
        return sum(n for kind, n in counts.items() if kind not in ("total", "processing"))

    @property
    def status(self) -> str:
        return str(self.state.get("status", "sent"))

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    def judge(self, entries: Iterator[tuple[str, str]]) -> None:
        """Hold the ``entries``, custom id and kind, against the order and what was told of it."""
        kinds, seen = self.order.ids(), Counter[str]()
        for custom_id, kind in entries:
            seen[custom_id] += 1
            self.entries[kind] += 1
            if kind != kinds.get(custom_id):
                self._fault(f"the line {custom_id!r} is {kind}, not {kinds.get(custom_id)}")
        self.missing = len(kinds.keys() - seen.keys())
        self.doubled = sum(count - 1 for count in seen.values())
        for what in ("missing", "doubled"):
            if count := getattr(self, what):
                self._fault(f"{count} lines are {what}")
        told, counted = self.state["request_counts"], self._counts()
        if told != counted:
            self._fault(f"its counts are {told}, and its entries {counted}")
        if self.status != "completed":
            self._fault(f"it ended as {self.status}: {self.state.get('errors')}")

    def _counts(self) -> dict[str, int]:
        succeeded = self.entries["succeeded"]
        failed = self.entries.total() - succeeded
        return {"total": self.order.lines, "completed": succeeded, "failed": failed}

    def _fault(self, what: str) -> None:
        self.faults.append(f"{self.order.name}: {what}")


class BatchClient:
    """A client that asks again while the service is down."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def send(self, order: BatchOrder) -> Sent:
        """Create the batch; where the service dies meanwhile it may exist twice, under two
        ids."""
        content = b"".join(_lines(order))

        def form() -> aiohttp.FormData:
            form = aiohttp.FormData()
            form.add_field("file", content, filename="requests.jsonl")
            form.add_field("purpose", "batch")
            return form

        file = await self.ask(order.key, "POST", "/v1/files", form=form)
        body = {"input_file_id": file["id"], "endpoint": _URL, "completion_window": "24h"}
        told = await self.ask(order.key, "POST", "/v1/batches", json=body)
        return Sent(order, told["id"], file["id"], told)

    async def look(self, sent: Sent) -> None:
        """Ask how far the batch is."""
        sent.state = await self.ask(sent.order.key, "GET", sent.path)

    async def read(self, sent: Sent) -> str:
        """Judge the entries of a batch that is over; returns a digest of what the service tells of
        it and of its files."""
        sent.entries.clear()
        digest = hashlib.sha256(json.dumps(sent.state, sort_keys=True).encode())
        found = []
        for is_output, path in self._results(sent):
            async with self._get(sent.order.key, path) as response:
                response.raise_for_status()
                async for text in response.content:
                    digest.update(text)
                    entry = json.loads(text)
                    kind = _kind(entry)
                    if is_output != (kind == "succeeded"):
                        kind = f"{kind} in the other file"
                    found.append((entry["custom_id"], kind))
        if sent.state["input_file_id"] != sent.input_id:
            sent.faults.append(f"{sent.order.name}: it has another input file now")
        sent.judge(iter(found))
        return digest.hexdigest()

    def _results(self, sent: Sent) -> Iterator[tuple[bool, str]]:
        """Paths of the results, with whether these are the lines that succeeded."""
        for is_output, what in ((True, "output_file_id"), (False, "error_file_id")):
            if sent.state[what]:
                yield is_output, f"/v1/files/{sent.state[what]}/content"

    async def ask(
        self,
        key: str,
        method: str,
        path: str,
        *,
        json: object = None,
        form: Callable[[], aiohttp.FormData] | None = None,
    ) -> dict[str, Any]:
        """Send a request until it is answered, also by a service that had no room or no disk for
        it. Raises ``ClientResponseError`` for an error that stays."""
        while True:
            sent = {"data": form()} if form else {"json": json}
            headers = {"Authorization": f"Bearer {key}"}
            try:
                async with self._http.request(
                    method, self._url + path, headers=headers, **sent
                ) as response:
                    response.raise_for_status()
                    answer: dict[str, Any] = await response.json()
                    return answer
            except aiohttp.ClientResponseError as error:
                if error.status != 503:
                    raise
            except AWAY:
                pass
            await asyncio.sleep(_RETRY_S)

    def _get(self, key: str, path: str) -> Any:
        return self._http.get(self._url + path, headers={"Authorization": f"Bearer {key}"})


def _kind(entry: dict[str, Any]) -> str:
    if entry["response"] is None:
        return str(entry["error"])
    status = entry["response"]["status_code"]
    return {200: "succeeded", 400: "errored"}.get(status, str(status))


def _lines(order: BatchOrder) -> Iterator[bytes]:
    for custom_id, kind in order.ids().items():
        body = request_body(-1 if kind == "errored" else _MAX_TOKENS)
        line = {"custom_id": custom_id, "method": "POST", "url": _URL, "body": body}
        yield json.dumps(line).encode() + b"\n"
