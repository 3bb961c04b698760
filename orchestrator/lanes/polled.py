"""A lane to another kind of server: jobs by its own API, its health by asking.

::

    run ─▶ reach (health, card) ─▶ poll … ─▶ gone ─▶ backoff ─▶ reach …
               ▲ up                          ▲ every job on it is lost
    submit ─▶ generate: one request per job ─▶ tokens … ─▶ finish
                 ▲ cancel, deadline: the request is closed, its end is reported by us

The server knows nothing of deadlines, so the lane keeps them: at a job's deadline it ends, whatever
the server says, and nothing that comes later is passed on. A closed request may hold its slot at
the server for the card's ``abort_ms``: for that time it counts as load.
"""

import asyncio
import random
from abc import abstractmethod
from typing import Final, Unpack

from orchestrator.clock import Clock
from orchestrator.errors import InstanceLost
from orchestrator.lanes.base import JobFields, JobSink, Lane, LaneOwner
from orchestrator.lanes.cards import BadFolder, ModelFolder, read_folder
from orchestrator.lanes.config import OPEN_TIMEOUT_S, LaneConfig
from orchestrator.lanes.endpoint import Endpoint
from orchestrator.lanes.lane_job import Finish, JobFailed, LaneJob, Piece, ServerLost
from orchestrator.lanes.meter import LaneMeter
from orchestrator.lanes.reconnector import Reconnector, SessionEnd
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
)

POLL_S: Final = 0.3
"""Seconds between two polls of the server's health: three before its silence counts."""
RECHECK_POLLS: Final = 20
"""Polls between two checks of which model the server serves: it may have come back with another."""
SAMPLE_EVERY: Final = 64
_MAX_IDS: Final = 2**31
_MAX_HELD: Final = 2**16
"""Most characters that wait for the token that they came of."""


class _Enough(Exception):
    """The server goes on beyond the tokens that it was asked for."""


class PolledLane(Lane):
    """Keeps a lane's promises; a kind of server adds how it is reached, polled and asked."""

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
        self._config = config
        self._rng = rng
        self._folder: ModelFolder | None = None
        self._card: ModelCard | None = None
        self._meter = LaneMeter()
        self._running: dict[int, LaneJob] = {}
        self._lingering = 0
        self._seq = 0
        self._until_sample = SAMPLE_EVERY
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
    async def _reach(self, folder: ModelFolder) -> ModelCard:
        """Check that the server is there, and make its card. Raises ``ServerLost``."""

    @abstractmethod
    async def _poll(self) -> int | None:
        """Ask for the server's health; returns how many jobs it has in all, None if it does not
        say.

        Raises ``ServerLost`` if it is gone; no answer in time is silence.
        """

    @abstractmethod
    async def _generate(self, job: LaneJob) -> Finish:
        """Have a job done, and tell each piece to ``_deliver``, whose exceptions are not caught.

        When cancelled, close the request, so that the server stops. Raises ``JobFailed`` and
        ``ServerLost``.
        """

    async def _begin_anew(self) -> None:
        """Drop a connection that was given up: it may be a dead one."""

    async def _disconnect(self) -> None:
        """Release what the lane holds. Idempotent."""

    # ── for those who have work ──────────────────────────────────────────────────────────────

    @property
    def load(self) -> int:
        return len(self._jobs) + self._lingering

    def submit(self, sink: JobSink, **job: Unpack[JobFields]) -> int:
        assert self.is_open, "submitted to a lane that is not open"
        now = self._clock.now()
        handle = self._add_job(sink)
        one = LaneJob(
            handle,
            sink,
            job["token_ids"],
            job["sampling"],
            job["on_deadline"],
            job["correlation_id"],
            sent_at=now,
            ends_at=now + job["budget_ms"] / 1000,
            cache_salt=job.get("cache_salt", ""),
        )
        self._running[handle] = one
        self._meter.begin(handle, now)
        one.timer = self._clock.call_at(one.ends_at, lambda: self._deadline_passed(one))
        one.task = asyncio.create_task(self._run_job(one), name=f"job {handle} {self.address}")
        self._tasks.add(one.task)
        one.task.add_done_callback(self._tasks.discard)
        return handle

    def cancel(self, handle: int, cause: AbortCause) -> None:
        job = self._running.get(handle)
        if job is not None and not job.is_over:
            self._give_up(job)
            end = self._end_of(job, FinishReason.CANCELLED, Code.CANCELLED, "cancelled")
            # The caller may be in the middle of something.
            asyncio.get_running_loop().call_soon(self._report_end, job, end)

    def pause(self, handle: int) -> None:
        """Do nothing: no such server can pause, as its card says."""

    def resume(self, handle: int) -> None:
        """Do nothing: no such server can pause, as its card says."""

    # ── for its owner ────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        await self._sessions.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._disconnect()

    def reopen(self) -> None:
        """Do nothing: each request names its model, so nothing is stale."""

    def describe(self) -> None:
        if self.is_open and self._card is not None:
            asyncio.get_running_loop().call_soon(self._report)

    def probe(self) -> None:
        """Do nothing: every poll is a probe."""

    # ── life ─────────────────────────────────────────────────────────────────────────────────

    async def _connect_and_poll(self) -> None:
        if self._folder is None:
            self._folder = await asyncio.to_thread(read_folder, self.endpoint.tokenizer)
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            card = await self._reach(self._folder)
        self._open(card)
        polls = 0
        while True:
            await asyncio.sleep(POLL_S)
            polls += 1
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    if polls % RECHECK_POLLS == 0:
                        self._take_card(await self._reach(self._folder))
                    jobs = await self._poll()
            except TimeoutError:
                continue  # silence, which the owner judges
            if jobs is not None:
                self._meter.saw_others(max(0, jobs - self.load))
            self.last_frame_at = self._clock.now()
            self._report()

    def _open(self, card: ModelCard) -> None:
        self._card = card
        self.sessions_total += 1
        self._sessions.is_up()
        self._seq = 0
        self.last_frame_at = self._clock.now()
        self.is_open = True
        self._owner.lane_opened(self, self._frame(card=card))

    def _take_card(self, card: ModelCard) -> None:
        if card != self._card:
            self._card = card
            self._owner.lane_reported(self, self._frame(card=card))

    def _report(self) -> None:
        if self.is_open:
            self._owner.lane_reported(self, self._frame())

    def _frame(self, card: ModelCard | None = None) -> Frame:
        self._seq += 1
        self.frames_total += 1
        return Frame(self._seq, stats=self._meter.report(self._clock.now()), card=card)

    async def _session_ended(self, end: SessionEnd) -> None:
        self.is_open = False
        for job in list(self._running.values()):
            self._give_up(job)
        self._lose_jobs()
        self._owner.lane_closed(self, end.reason or "the orchestrator is stopping")
        if not end.is_closed:
            await self._begin_anew()

    # ── one job ──────────────────────────────────────────────────────────────────────────────

    async def _run_job(self, job: LaneJob) -> None:
        try:
            finish = await self._generate(job)
        except JobFailed as error:
            end = self._end_of(job, FinishReason.ERROR, error.code, str(error))
        except _Enough:
            end = self._end_of(job, FinishReason.LENGTH, None, "", Finish(FinishReason.LENGTH))
        except asyncio.CancelledError:  # a library's own, where nobody gave the job up
            self._lose(job, "its request was cancelled")
            raise
        except ServerLost as error:
            self._lose(job, str(error))
            return
        except Exception as error:
            lane_log.exception("a job failed unexpectedly", extra=fields(instance=self.address))
            what = f"the lane failed: {type(error).__name__}"
            end = self._end_of(job, FinishReason.ERROR, Code.INTERNAL, what)
        else:
            end = self._whole(job, finish)
        if not job.is_over:
            self._stop_timing(job)
            self._report_end(job, end)

    def _deliver(self, job: LaneJob, piece: Piece) -> None:
        """Pass a part of an answer on, unless the job is over."""
        if job.is_over:
            return
        now = self.last_frame_at = self._clock.now()
        ids, logprobs = list(piece.ids), piece.logprobs
        if ids and not NO_TOKEN_ID <= min(ids) <= max(ids) < _MAX_IDS:
            raise JobFailed(Code.ENGINE_ERROR, "its server sent a token id that no vocabulary has")
        if len(ids) > job.left_tokens:  # the server does not heed the limit
            if not job.left_tokens:
                raise _Enough
            ids, logprobs = ids[: job.left_tokens], logprobs and logprobs[: job.left_tokens]
        text = job.held + piece.text
        if not ids:
            if len(text) > _MAX_HELD:
                raise JobFailed(Code.ENGINE_ERROR, "its server sends text without any tokens")
            job.held = text
            return
        job.held = ""
        if not job.first_token_at:
            job.first_token_at = now
            self._meter.first_token(len(job.token_ids))
            job.sink.on_started(0.0)
        count = len(ids)
        job.completion_tokens += count
        self._meter.tokens(job.handle, count)
        self.tokens_total += count
        # The last token carries the text of all of them.
        texts = [""] * (count - 1) + [text]
        job.sink.on_tokens(Delta(job.handle, ids, texts, logprobs), now)
        self._until_sample -= 1
        if self._until_sample <= 0:
            self._until_sample = SAMPLE_EVERY
            self._owner.emission_sampled(self._clock.now() - now, count)

    def _deadline_passed(self, job: LaneJob) -> None:
        if job.is_over:
            return
        if self._clock.now() < job.ends_at:
            job.timer = self._clock.call_at(job.ends_at, lambda: self._deadline_passed(job))
            return
        self._give_up(job)
        if job.finish is not None:  # all of its text was here in time
            self._report_end(job, self._whole(job, job.finish))
            return
        is_error = job.on_deadline is OnDeadline.ERROR
        made = f"after {job.completion_tokens} tokens" if job.completion_tokens else "before any"
        self._report_end(
            job,
            self._end_of(
                job,
                FinishReason.DEADLINE,
                Code.DEADLINE_EXCEEDED if is_error else None,
                f"the deadline passed {made}" if is_error else "",
            ),
        )

    def _whole(self, job: LaneJob, finish: Finish) -> End:
        if job.held:
            finish = finish._replace(tail=job.held + finish.tail)
        return self._end_of(job, finish.reason, None, "", finish)

    def _give_up(self, job: LaneJob) -> None:
        """Close a job's request. From here on nothing of it is passed on."""
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

    def _stop_timing(self, job: LaneJob) -> None:
        job.is_over = True
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        self._meter.end(job.handle, self._clock.now())

    def _report_end(self, job: LaneJob, end: End) -> None:
        self._running.pop(job.handle, None)
        sink = self._jobs.pop(job.handle, None)
        if sink is not None:
            sink.on_ended(end)

    def _lose(self, job: LaneJob, reason: str) -> None:
        """Lose one job whose server went away; the next poll tells if for good."""
        if job.is_over:
            return
        self._stop_timing(job)
        self._running.pop(job.handle, None)
        sink = self._jobs.pop(job.handle, None)
        if sink is not None:
            sink.on_lost(InstanceLost(f"the instance that worked on this was lost: {reason}"))

    def _end_of(
        self,
        job: LaneJob,
        reason: FinishReason,
        code: Code | None,
        message: str,
        finish: Finish | None = None,
    ) -> End:
        now = self._clock.now()
        first = job.first_token_at or now
        return End(
            handle=job.handle,
            reason=reason,
            prompt_tokens=len(job.token_ids),
            completion_tokens=job.completion_tokens,
            wait_ms=0.0,
            prefill_ms=1000 * (first - job.sent_at),
            decode_ms=1000 * (now - first),
            left_ms=1000 * (job.ends_at - now),
            code=code,
            message=message,
            tail="" if finish is None else finish.tail,
            cached_tokens=0 if finish is None else finish.cached_tokens,
            stop="" if finish is None else finish.stop,
            stop_token_id=None if finish is None else finish.stop_token_id,
        )

    def _lose_jobs(self) -> None:
        self._running.clear()
        super()._lose_jobs()
