"""A lane to another kind of server: jobs by its own API, its health by polling.

::

    run ─▶ reach (health, card) ─▶ poll … ─▶ gone ─▶ backoff ─▶ reach …
               ▲ up                          ▲ every job on it is lost
    submit ─▶ generate: one request per job ─▶ tokens … ─▶ finish
                 ▲ cancel, deadline: the request is closed, its end is reported by us

The server does not support deadlines, so the lane enforces them: a job ends at its deadline, and
later output is dropped. A closed request may hold its slot at the server for the card's
``abort_ms``: it counts as load for that time.
"""

import asyncio
import random
import re
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, Unpack

import msgspec

from orchestrator.clock import Clock
from orchestrator.lanes.base import JobFields, JobSink, Lane, LaneOwner, lost
from orchestrator.lanes.config import OPEN_TIMEOUT_S, LaneConfig
from orchestrator.lanes.endpoint import Endpoint
from orchestrator.lanes.reconnector import Reconnector, SessionEnd
from orchestrator.lanes.servers.cards import (
    BadFolder,
    ModelFolder,
    ServerFacts,
    make_card,
    read_folder,
)
from orchestrator.lanes.servers.connection import ServerConnection, decoded
from orchestrator.lanes.servers.job import Finish, JobFailed, ServerJob, ServerLost
from orchestrator.lanes.servers.meter import LaneMeter
from orchestrator.lanes.servers.text import PromptText, StopCutter, UnsendablePrompt
from orchestrator.telemetry.log import fields, lane_log
from protocol import (
    NO_TOKEN_ID,
    AbortCause,
    Code,
    Delta,
    End,
    FinishReason,
    Frame,
    ModelCard,
    OnDeadline,
    TokenLogprob,
)

POLL_S: Final = 0.3
"""Seconds between two polls of the server's health: three before its silence counts."""
RECHECK_POLLS: Final = 20
"""Number of polls between checks of the server's model: it may have returned with another."""
USAGE_S = 1.0
"""Seconds that an ended text waits for the server's final facts."""
_MAX_IDS: Final = 2**31
_MAX_HELD: Final = 2**16
"""Maximum characters that wait for their token."""


class _Ended(Exception):
    """The text ends here, even if the server sends more."""


class ServerLane(Lane):
    """A lane to one server. A kind of server states these facts and adds the abstract methods."""

    path: str
    """The path for jobs."""
    decoder: msgspec.json.Decoder[Any]
    """Decodes an event, a ``ServerEvent``."""
    health, facts_show_health = "/health", False
    """The path that shows whether the server is up, and whether its facts come from there too."""
    running: re.Pattern[bytes] | None = None
    """Finds the number of jobs in the server's ``/metrics``; None if it is not there."""
    count_every_s = 0.0
    """Least seconds between two readings of that number."""
    takes_text = False
    """Whether prompts are sent as text instead of token ids."""
    counts_tokens = False
    """Whether the lane counts the tokens of texts, because the server does not."""
    leaves_stops = False
    """Whether the server leaves stop strings in its text."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: LaneConfig,
        owner: LaneOwner,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        super().__init__(endpoint.name, owner, clock)
        self.endpoint = endpoint
        self.server = ServerConnection(endpoint.base_url)
        self._folder: ModelFolder | None = None
        self._tokenizer: PromptText | None = None
        self._card: ModelCard | None = None
        self._meter = LaneMeter()
        self._count_at = 0.0
        self._jobs: dict[int, ServerJob] = {}
        self._lingering = 0
        self._seq = 0
        self._sessions = Reconnector(
            "lane",
            endpoint.name,
            self._connect_and_poll,
            self._session_ended,
            rng=rng,
            expected=(ServerLost, BadFolder),
        )
        self._tasks: set[asyncio.Task[None]] = set()

    # ── a kind of server adds ────────────────────────────────────────────────────────────────

    @abstractmethod
    async def _facts(self) -> ServerFacts:
        """The server's facts. Raises ``ServerLost``."""

    @abstractmethod
    def _request(self, job: ServerJob, prompt: str | list[int]) -> dict[str, Any]:
        """The request body of a job."""

    @abstractmethod
    def _take(self, job: ServerJob, event: Any) -> bool:
        """Deliver an event's tokens; set ``finish`` at the end. True for the job's last event."""

    # ── for callers with work ───────────────────────────────────────────────────────────────

    @property
    def load(self) -> int:
        return len(self._jobs) + self._lingering

    def submit(self, sink: JobSink, **asked: Unpack[JobFields]) -> int:
        assert self.is_open, "submitted to a lane that is not open"
        now = self._clock.now()
        handle = self.submitted_total
        self.submitted_total += 1
        sampling = asked["sampling"]
        job = ServerJob(
            handle,
            sink,
            asked["token_ids"],
            sampling,
            asked["on_deadline"],
            asked["correlation_id"],
            sent_at=now,
            ends_at=now + asked["budget_ms"] / 1000,
            cache_salt=asked.get("cache_salt", ""),
            cutter=StopCutter(sampling.stop) if self.leaves_stops and sampling.stop else None,
        )
        self._jobs[handle] = job
        self._meter.begin(handle, now)
        job.timer = self._clock.call_at(job.ends_at, lambda: self._deadline_passed(job))
        job.task = asyncio.create_task(self._run_job(job), name=f"job {handle} {self.address}")
        self._tasks.add(job.task)
        job.task.add_done_callback(self._tasks.discard)
        return handle

    def cancel(self, handle: int, cause: AbortCause) -> None:
        job = self._jobs.get(handle)
        if job is not None and not job.is_over:
            self._give_up(job)
            # The caller may be in the middle of something.
            asyncio.get_running_loop().call_soon(
                self._end, job, Finish(FinishReason.CANCELLED), Code.CANCELLED, "cancelled"
            )

    # ── for its owner ────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        await self._sessions.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.server.close()

    def describe(self) -> None:
        if self.is_open:
            asyncio.get_running_loop().call_soon(self._report)

    # ── life ─────────────────────────────────────────────────────────────────────────────────

    async def _connect_and_poll(self) -> None:
        folder = self._folder
        if folder is None:
            folder = self._folder = await asyncio.to_thread(read_folder, self.endpoint.tokenizer)
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            if (self.takes_text or self.counts_tokens) and self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(PromptText, folder.tokenizer_json)
            facts = await self._reach()
        self._card = make_card(self.endpoint, folder, facts)
        self.sessions_total += 1
        self._sessions.is_up()
        self._seq = 0
        self.last_frame_at = self._clock.now()
        self.is_open = True
        self._owner.lane_opened(self, self._frame(self._card))
        polls = 0
        while True:
            await asyncio.sleep(POLL_S)
            polls += 1
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    if polls % RECHECK_POLLS == 0:
                        card = make_card(self.endpoint, folder, await self._reach())
                        if card != self._card:
                            self._card = card
                            self._owner.lane_reported(self, self._frame(card))
                    await self.server.get(self.health)
                    await self._count_others()
            except TimeoutError:
                continue  # silence: the owner judges it
            self.last_frame_at = self._clock.now()
            self._report()

    async def _reach(self) -> ServerFacts:
        """Identify the server, with its present key. Raises ``ServerLost`` and ``BadFolder``."""
        if self.endpoint.key_file is not None:
            await self.server.read_key(self.endpoint.key_file)
        if not self.facts_show_health:
            await self.server.get(self.health)
        return await self._facts()

    async def _count_others(self) -> None:
        """Ask for the number of the server's jobs, if it says it and the last reading is old."""
        if self.running is None or self._clock.now() < self._count_at:
            return
        self._count_at = self._clock.now() + self.count_every_s
        with suppress(ServerLost, ValueError, OverflowError):
            found = self.running.findall(await self.server.get("/metrics"))
            if found:
                self._meter.saw_others(max(0, round(sum(map(float, found))) - self.load))

    def _report(self) -> None:
        if self.is_open:
            self._owner.lane_reported(self, self._frame())

    def _frame(self, card: ModelCard | None = None) -> Frame:
        self._seq += 1
        self.frames_total += 1
        return Frame(self._seq, stats=self._meter.report(self._clock.now()), card=card)

    async def _session_ended(self, end: SessionEnd) -> None:
        self.is_open = False
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            if not job.is_over:
                self._give_up(job)
            job.sink.on_lost(lost())
        self._owner.lane_closed(self, end.reason or "the orchestrator is stopping")

    # ── one job ──────────────────────────────────────────────────────────────────────────────

    async def _run_job(self, job: ServerJob) -> None:
        finish: Finish | None = Finish(FinishReason.ERROR)
        code, said = None, ""
        try:
            prompt: str | list[int] = job.token_ids
            if self.takes_text:
                assert self._tokenizer is not None
                prompt = await self._tokenizer.prompt_of(job.token_ids)
            finish = await self._generate(job, prompt)
        except _Ended:
            finish = job.finish
        except UnsendablePrompt as error:
            code, said = Code.INVALID_REQUEST, str(error)
        except JobFailed as error:
            code, said = error.code, str(error)
        except asyncio.CancelledError:  # a library's own; the job was not cancelled
            self._lose(job, "its request was cancelled")
            raise
        except ServerLost as error:
            self._lose(job, str(error))
            return
        except Exception as error:
            lane_log.exception("a job failed unexpectedly", extra=fields(instance=self.address))
            code, said = Code.INTERNAL, f"the lane failed: {type(error).__name__}"
        if not job.is_over:
            assert finish is not None
            self._stop_timing(job)
            self._end(job, finish, code, said)

    async def _generate(self, job: ServerJob, prompt: str | list[int]) -> Finish:
        """Run a job to the end of its text. Raises ``_Ended``, ``JobFailed`` and ``ServerLost``."""
        request = self._request(job, prompt)
        with suppress(TimeoutError):  # of the wait for the final facts
            async with (
                asyncio.timeout(None) as limit,
                aclosing(self.server.events(self.path, request, job.correlation_id)) as events,
            ):
                async for data in events:
                    if self._take(job, decoded(self.decoder, data)):
                        break
                    if job.finish is not None and limit.when() is None:
                        limit.reschedule(asyncio.get_running_loop().time() + USAGE_S)
        if job.finish is None:  # the answer ended without a finish
            raise ServerLost("its answer ended early")
        return _whole(job, job.finish)

    def _deliver(
        self,
        job: ServerJob,
        ids: Sequence[int],
        text: str,
        logprobs: list[TokenLogprob] | None = None,
    ) -> None:
        """Pass on a part of an answer, unless the job is over: the ids of its new tokens and their
        text. ``logprobs`` are parallel to ``ids`` if asked for."""
        if job.is_over:
            return
        now = self.last_frame_at = self._clock.now()
        if ids and not NO_TOKEN_ID <= min(ids) <= max(ids) < _MAX_IDS:
            raise JobFailed(Code.ENGINE_ERROR, "its server sent a token id that no vocabulary has")
        if len(ids) > job.left_tokens:  # the server ignores the limit
            if not job.left_tokens:
                job.finish = Finish(FinishReason.LENGTH)
                raise _Ended
            ids, logprobs = ids[: job.left_tokens], logprobs and logprobs[: job.left_tokens]
        text = job.held + (text if job.cutter is None else job.cutter.feed(text))
        job.held = "" if ids else text
        if len(job.held) > _MAX_HELD:
            raise JobFailed(Code.ENGINE_ERROR, "its server sends text without any tokens")
        if count := len(ids):
            if not job.first_token_at:
                job.first_token_at = now
                self._meter.first_token(len(job.token_ids))
                job.sink.on_started(0.0)
            job.completion_tokens += count
            self._meter.tokens(job.handle, count)
            self.tokens_total += count
            # The last token carries the text of all of them.
            texts = [""] * (count - 1) + [text]
            job.sink.on_tokens(Delta(job.handle, list(ids), texts, logprobs), now)
            self._sample_emission(now, count)
        if job.cutter is not None and job.cutter.found:
            job.finish = Finish(FinishReason.STOP, stop=job.cutter.found, tail=job.held)
            raise _Ended

    def _deadline_passed(self, job: ServerJob) -> None:
        if job.is_over:
            return
        if self._clock.now() < job.ends_at:
            job.timer = self._clock.call_at(job.ends_at, lambda: self._deadline_passed(job))
            return
        self._give_up(job)
        if job.finish is not None:  # all of its text was here in time
            self._end(job, _whole(job, job.finish))
        elif job.on_deadline is OnDeadline.ERROR:
            n = job.completion_tokens
            said = f"the deadline passed {f'after {n} tokens' if n else 'before any'}"
            self._end(job, Finish(FinishReason.DEADLINE), Code.DEADLINE_EXCEEDED, said)
        else:
            self._end(job, Finish(FinishReason.DEADLINE))

    def _give_up(self, job: ServerJob) -> None:
        """Close a job's request. After this none of its output is passed on."""
        self._stop_timing(job)
        if job.task is not None and job.task is not asyncio.current_task():
            job.task.cancel()
        abort_ms = 0.0 if self._card is None else self._card.abort_ms
        if abort_ms:
            self._lingering += 1
            self._clock.call_at(self._clock.now() + abort_ms / 1000, self._slot_free)

    def _slot_free(self) -> None:
        self._lingering -= 1
        self._report()

    def _stop_timing(self, job: ServerJob) -> None:
        job.is_over = True
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        self._meter.end(job.handle, self._clock.now())

    def _lose(self, job: ServerJob, reason: str) -> None:
        """Lose one job whose server was lost; the next poll shows if it is permanent."""
        if not job.is_over:
            self._stop_timing(job)
            if self._jobs.pop(job.handle, None) is not None:
                job.sink.on_lost(lost(reason))

    def _end(
        self, job: ServerJob, finish: Finish, code: Code | None = None, message: str = ""
    ) -> None:
        """Report a job's end, once."""
        if self._jobs.pop(job.handle, None) is None:
            return
        now = self._clock.now()
        first = job.first_token_at or now
        end = End(
            handle=job.handle,
            reason=finish.reason,
            prompt_tokens=len(job.token_ids),
            completion_tokens=job.completion_tokens,
            wait_ms=0.0,
            prefill_ms=1000 * (first - job.sent_at),
            decode_ms=1000 * (now - first),
            left_ms=1000 * (job.ends_at - now),
            code=code,
            message=message,
            tail=finish.tail,
            cached_tokens=finish.cached_tokens,
            stop=finish.stop,
            stop_token_id=finish.stop_token_id,
        )
        job.sink.on_ended(end)


def _whole(job: ServerJob, finish: Finish) -> Finish:
    """The end of a complete text, with all text that was held back."""
    return finish._replace(tail=job.held + ("" if job.cutter is None else job.cutter.held))
