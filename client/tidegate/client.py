"""The asynchronous client of Tidegate's API."""

import uuid
from datetime import timedelta
from typing import Self, Unpack
from urllib.parse import quote

import msgspec

from tidegate.deadlines import Deadline, DeadlineScope, block_seconds, due, to_seconds
from tidegate.errors import ProtocolError
from tidegate.following import Stream, cancel, follow, path_of, submit_and_follow
from tidegate.operating import Operating
from tidegate.requests import Prompt, Quote, TaskOptions, task_body, wire_options
from tidegate.results import (
    End,
    Generation,
    Instance,
    InstanceList,
    ModelInfo,
    ModelList,
    Submitted,
    TaskList,
    TaskStatus,
    Token,
)
from tidegate.sessions import Sessions
from tidegate.transport import HttpCall, Retries, Transport

DEFAULT_BASE_URL = "http://127.0.0.1:8080"


class Client:
    """A client of one orchestrator; close it, or use it in ``async with``.

    ``token`` is the bearer token. ``reconnect_for`` (seconds or a ``timedelta``) limits how long a
    broken event stream of a task without its own deadline is retried. ``retries`` limits how often
    a call is retried. Raises ``ValueError`` for a malformed ``base_url`` or ``reconnect_for``.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        token: str | None = None,
        reconnect_for: timedelta | float = 30.0,
        retries: Retries | None = None,
    ) -> None:
        self._reconnect_for_s = block_seconds(reconnect_for, "reconnect_for")
        if self._reconnect_for_s < 0:
            raise ValueError(f"reconnect_for must be 0 seconds or more, got {reconnect_for!r}")
        self._transport = Transport(base_url, token, retries or Retries())
        self.base_url = self._transport.base_url
        self.sessions = Sessions(self, self._transport)
        """Conversations that the service keeps."""
        self.operating = Operating(self._transport)
        """Calls to operate the service: drains, swaps and reloads."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Tasks continue as their ``on_disconnect`` says."""
        await self._transport.close()

    @staticmethod
    def run(
        deadline: Deadline, *, wind_down: float | None = None, tools_until: float | None = None
    ) -> DeadlineScope:
        """A block for an agent's loop. Its conversations tell the model the time left."""
        return DeadlineScope(
            to_seconds(deadline), tell_time=True, wind_down=wind_down, tools_until=tools_until
        )

    # ── the API, call by call ────────────────────────────────────────────────────────────────

    async def models(self) -> list[str]:
        """Names of the models that are served."""
        return [model.id for model in await self.model_infos()]

    async def model_infos(self) -> tuple[ModelInfo, ...]:
        """Served models, with their facts."""
        return (await self._transport.get("/v1/models", ModelList)).data

    async def instances(self) -> tuple[Instance, ...]:
        """Current state of the instances (Tritons) behind the service."""
        return (await self._transport.get("/v2/instances", InstanceList)).instances

    async def tasks(self, *, status: str | None = None, limit: int = 100) -> TaskList:
        """List the tasks of this client's key: running tasks, then ended ones, newest first.

        ``status`` is ``queued``, ``dispatched``, ``running`` or ``ended``.
        """
        chosen = "" if status is None else f"&status={quote(status)}"
        return await self._transport.get(f"/v2/tasks?limit={limit}{chosen}", TaskList)

    async def submit(
        self, prompt: Prompt, *, idempotency_key: str | None = None, **options: Unpack[TaskOptions]
    ) -> Submitted:
        """Submit a task and return at once. Raises ``ApiError`` if it is refused. The task runs
        only once per ``idempotency_key``, even if it is sent again; the default is a random key.
        """
        return await self._transport.call(_submission(prompt, options, idempotency_key), Submitted)

    async def quote(
        self,
        prompt: Prompt | None = None,
        *,
        prompt_tokens: int | None = None,
        accept: float | None = None,
        hold: Deadline = 5000.0,
        **options: Unpack[TaskOptions],
    ) -> Quote:
        """Get the chance that a task would be in time, per deadline, without sending it.

        ``prompt_tokens`` stands for a prompt of that length. ``accept`` (0.5, 0.9 or 0.99) reserves
        the earliest deadline with that chance for the time ``hold``. Pass the quote's
        ``reservation`` to the call that uses it. Raises ``ApiError``, and ``ValueError`` without a
        prompt or its length.
        """
        deadline = due(options.get("deadline"))
        if (prompt is None) is (prompt_tokens is None):
            raise ValueError(
                "a quote needs either a prompt or prompt_tokens (the length of a prompt)"
            )
        if prompt is None:
            body = {**wire_options(options, deadline), "prompt_tokens": prompt_tokens}
        else:
            body = task_body(prompt, options, deadline)
        if accept is not None:
            body |= {"accept": accept, "hold_ms": to_seconds(hold) * 1000}
        call = HttpCall("POST", "/v2/quote", body=body, ends_at=deadline.at)
        return await self._transport.call(call, Quote)

    async def status(self, task_id: str) -> TaskStatus:
        """Get a task's current state. Raises ``NotFound``."""
        return await self._transport.get(path_of(task_id), TaskStatus)

    async def cancel(self, task_id: str, /) -> None:
        """Cancel a task. Idempotent. Returns once the server has accepted it; the work ends within
        one step. Sent even if a block's deadline has passed.
        """
        await cancel(self._transport, task_id)

    def events(
        self, task_id: str, /, *, last_event_id: str = "", deadline: Deadline | None = None
    ) -> Stream:
        """Events of a task, from the beginning or after ``last_event_id``, to the terminal one.

        A broken connection is reopened at the same position, without a lost or repeated event,
        until ``deadline`` (or ``reconnect_for`` after the last sign of life). Then ``StreamLost``
        is raised. A task that failed yields its event and raises nothing.
        """
        ends_at, patience_s = due(deadline).at, self._reconnect_for_s
        return Stream(
            follow(self._transport, task_id, ends_at, patience_s, last_event_id), last_event_id
        )

    # ── a task followed to its end ───────────────────────────────────────────────────────────

    def stream(self, prompt: Prompt, **options: Unpack[TaskOptions]) -> Stream:
        """Submit a task and yield its events; a task that fails raises its ``ApiError``.

        Leaving the stream early cancels the task (see ``Stream``). The deadline starts now, but the
        task is submitted when the first event is requested.
        """
        submission = _submission(prompt, options)
        return Stream(submit_and_follow(self._transport, submission, self._reconnect_for_s))

    async def generate(self, prompt: Prompt, **options: Unpack[TaskOptions]) -> Generation:
        """Submit a task and wait for its whole text. Raises ``ApiError`` if it fails."""
        texts: list[str] = []
        token_ids: list[int] = []
        async with self.stream(prompt, **options) as events:
            async for event in events:
                if isinstance(event, Token):
                    texts.append(event.text)
                    token_ids.extend(event.token_ids)
                elif isinstance(event, End):
                    how = msgspec.structs.asdict(event)
                    return Generation("".join(texts), tuple(token_ids), **how)
        raise ProtocolError("the stream ended without a terminal event")


def _submission(prompt: Prompt, options: TaskOptions, key: str | None = None) -> HttpCall:
    """Build the request of a task; its deadline starts now. Raises ``DeadlineExceeded``."""
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    deadline = due(options.get("deadline"))
    body, ends_at = task_body(prompt, options, deadline), deadline.at
    if (reservation := options.get("reservation")) is not None:
        headers["X-Deadline"] = str(reservation.deadline_unix_ms)
        ends = deadline.at, due(1000 * reservation.left_s).at
        ends_at = min(at for at in ends if at is not None)
    return HttpCall("POST", "/v2/tasks", body=body, headers=headers, ends_at=ends_at)
