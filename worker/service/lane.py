"""The lane contract: one stream carries many jobs, and one frame carries events of several jobs."""

from protocol import (
    Delta,
    End,
    FinishReason,
    Frame,
    KvReport,
    ModelCard,
    Started,
    Submit,
    WorkerStats,
    encode,
)
from protocol.tensors import FRAME
from worker.core import Job, JobFinished, JobPrompt, JobStarted, JobTokens
from worker.engine.kv_events import KvEvents
from worker.errors import ResponderLost, code_of
from worker.log import service_log
from worker.service.call import Responder, strings
from worker.service.replies import JobReply, as_shown
from worker.text import TextStream

MAX_HASHES = 8192
"""Maximum number of hashes in one frame, 34 bytes each; the rest wait for the next frame."""


class KvMirror:
    """The block hashes in the prefix cache, as of the last report read."""

    def __init__(self) -> None:
        self.hashes: dict[bytes, None] = {}

    def apply(self, report: KvReport) -> None:
        if report.full:
            self.hashes = dict.fromkeys(report.added)
            return
        for block_hash in report.evicted:
            self.hashes.pop(block_hash, None)
        self.hashes.update(dict.fromkeys(report.added))


_PROMPT_TOKENS = 512
"""Prompt tokens per frame of log-probabilities: 200 KB if each token has its 20 likeliest."""


class Lane:
    """One open lane. Collects events; ``flush`` sends them as one frame."""

    def __init__(self, name: str, responder: Responder) -> None:
        self.name = name
        self.responder = responder
        self.jobs: dict[int, LaneJob] = {}
        """Running jobs by handle."""
        self.last_sent = 0.0
        self.kv_events = KvEvents(())
        """Changes of the prefix cache not reported yet."""
        self.ended = False
        self._seq = 0
        self._deltas: dict[int, Delta] = {}
        self._frame = Frame(0)
        self._pending = False

    def next_frame(self) -> Frame:
        """The frame that ``flush`` sends, to add something to."""
        self._pending = True
        return self._frame

    def running_jobs(self) -> list[Job]:
        return [one.job for one in list(self.jobs.values())]

    def report(self, stats: WorkerStats, *, draining: bool) -> None:
        """Put statistics and KV events into the next frame."""
        frame = self.next_frame()
        frame.stats, frame.draining = stats, draining
        if frame.cache is None:
            frame.cache = self.kv_events.take(MAX_HASHES)

    def add(self, delta: Delta) -> None:
        """Take over ``delta``. One frame has one delta per job: its tokens are merged."""
        known = self._deltas.get(delta.handle)
        if known is None:
            self._deltas[delta.handle] = delta
            self._pending = True
            return
        known.extend(delta)

    def paused(self, handle: int) -> None:
        frame = self.next_frame()
        if handle in frame.resumed:  # resumed since the last frame: no change
            frame.resumed.remove(handle)
        else:
            frame.paused.append(handle)

    def end(self, end: End) -> None:
        """Add a handle's terminal record. The handle can be reused afterwards."""
        self.jobs.pop(end.handle, None)
        self.next_frame().ends.append(end)

    def flush(self) -> None:
        if not self._pending or self.ended:
            return
        frame = self._frame
        if frame.prompts:
            self._send_prompts(frame)
        frame.deltas = list(self._deltas.values())
        self._frame = Frame(0)
        self._deltas = {}
        self._pending = False
        self._send(frame)

    def _send_prompts(self, frame: Frame) -> None:
        """Send the prompt log-probabilities in ``frame`` before it, few per frame, so that tokens
        do not wait while the other end reads those of long prompts."""
        prompts, frame.prompts = frame.prompts, []
        ahead, frame.started = Frame(0, started=frame.started), []
        read = 0
        for prompt in prompts:
            ahead.prompts.append(prompt)
            read += len(prompt[1])
            if read >= _PROMPT_TOKENS:
                self._send(ahead)
                ahead, read = Frame(0), 0
        if read:
            self._send(ahead)

    def _send(self, frame: Frame) -> None:
        frame.seq = self._seq
        self._seq += 1
        self.responder.send({FRAME: strings(encode(frame))})

    def close(self) -> None:
        self.ended = True
        self.responder.close()


class LaneJob(JobReply):
    """One job on a lane. Its own Triton request stays open until the job ends, unused."""

    def __init__(
        self, lane: Lane, handle: int, job: Job, text: TextStream, responder: Responder
    ) -> None:
        self.lane = self.reply = lane
        self.handle = handle
        self.job = job
        self._text = text
        self._responder = responder
        self._delivered = 0
        self._stopped = False

    def started(self, event: JobStarted) -> None:
        self.lane.next_frame().started.append(Started(self.handle, event.wait_ms))

    def prompt(self, event: JobPrompt) -> None:
        self.lane.next_frame().prompts.append((self.handle, event.logprobs))

    def tokens(self, event: JobTokens) -> bool:
        if self._stopped:
            return False
        ids, logprobs = event.ids, event.logprobs
        fed = self._text.feed(ids)
        texts, stopped_at = fed.texts, fed.stopped_at
        if stopped_at is not None:
            self._stopped = True
            end = stopped_at + 1
            ids, texts = ids[:end], texts[:end]
            logprobs = None if logprobs is None else logprobs[:end]
        self._delivered += len(ids)
        if event.cached_tokens is not None:
            self.lane.next_frame().cached.append((self.handle, event.cached_tokens))
        self.lane.add(Delta(self.handle, ids, texts, logprobs))
        return self._stopped

    def paused(self) -> None:
        self.lane.paused(self.handle)

    def resumed(self) -> None:
        self.lane.next_frame().resumed.append(self.handle)

    def finished(self, event: JobFinished) -> None:
        try:
            self.lane.end(self._end(event))
        finally:
            self._responder.close()

    def _end(self, event: JobFinished) -> End:
        tail, stopped = ("", True) if self._stopped else self._text.flush()
        event = as_shown(event, stopped)
        return End(
            handle=self.handle,
            reason=event.reason,
            prompt_tokens=event.prompt_tokens,
            completion_tokens=self._delivered,
            wait_ms=event.wait_ms,
            prefill_ms=event.prefill_ms,
            decode_ms=event.decode_ms,
            left_ms=event.left_ms,
            code=event.code,
            message=event.message,
            late_tokens=event.late_tokens,
            abort_ms=event.abort_ms,
            tail=tail,
            cached_tokens=event.cached_tokens,
            spared=event.spared,
            stop=self._text.stop if event.reason is FinishReason.STOP else "",
            stop_token_id=self._text.stop_token_id,
        )


def try_to_send(responder: Responder, frame: Frame, *, final: bool) -> None:
    """Send a frame outside a lane, to a client that may be gone."""
    try:
        responder.send({FRAME: strings(encode(frame))}, final=final)
    except ResponderLost as error:
        service_log.info("the client of a frame has disconnected: %s", error)


def refused(handle: int, prompt_tokens: int, error: Exception) -> End:
    """Make the terminal record of a job that the engine never saw."""
    return End(
        handle=handle,
        reason=FinishReason.ERROR,
        prompt_tokens=prompt_tokens,
        code=code_of(error),
        message=str(error),
    )


def end_of_complete(text: TextStream, message: Submit, card: ModelCard) -> End | None:
    """Feed the tokens generated earlier, whose text was already sent. Returns the job's end if only
    the end is missing, otherwise None.

    A worker may die between its last token and the job's end. The text that it held back (a
    possible stop string, half a character) becomes the end's ``tail``.
    """
    begun, sampling = message.begun, message.sampling
    if not begun:
        return None
    stopped = text.feed(begun).stopped_at is not None
    is_over = (
        stopped
        or text.stop_token_id is not None
        or (not sampling.ignore_eos and begun[-1] in card.eos_token_ids)
    )
    if not is_over and sampling.max_tokens > 0:
        return None
    tail, stopped_by_tail = ("", False) if stopped else text.flush()
    has_stopped = is_over or stopped_by_tail
    return End(
        handle=message.handle,
        reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
        prompt_tokens=len(message.token_ids),
        left_ms=message.budget_ms,
        tail=tail,
        stop=text.stop if has_stopped else "",
        stop_token_id=text.stop_token_id,
    )
