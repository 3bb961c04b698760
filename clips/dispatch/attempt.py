"""One clip on one instance. It has its own stream; ending the stream cancels the clip."""

import asyncio
from typing import Protocol

from google.protobuf.message import DecodeError

from clips.dispatch.forecast import Begun
from clips.dispatch.job import OUTPUTS
from clips.dispatch.task import ClipTask
from clips.dispatch.wire import METHOD, BadAnswer, ClipAnswer, read_answer, request
from orchestrator.clock import Clock
from orchestrator.lanes import LaneConfig
from orchestrator.lanes.config import OPEN_TIMEOUT_S
from orchestrator.lanes.grpc_call import CallEnded, GrpcCall, open_call
from orchestrator.telemetry.log import fields, lane_log

_EVENT_FIELDS = frozenset(("event", "stage", "percent"))


class AttemptSink(Protocol):
    """Receives the end of an attempt: exactly one of these calls, unless it was stopped."""

    def finished(self, attempt: "ClipAttempt") -> None:
        """The clip is complete, with its facts and files."""

    def refused(self, attempt: "ClipAttempt", error: str) -> None:
        """The worker, or Triton, ended the clip with this error."""

    def lost(self, attempt: "ClipAttempt", reason: str) -> None:
        """The attempt was lost; no more events come."""


class ClipAttempt:
    """A clip that was sent to ``address``; ``begun`` is its progress. With ``keep_on``, only its
    deadline stops it."""

    def __init__(
        self,
        clip: ClipTask,
        address: str,
        begun: Begun,
        sink: AttemptSink,
        clock: Clock,
        *,
        keep_on: bool = False,
    ) -> None:
        self.clip = clip
        self.address = address
        self.begun = begun
        self._sink = sink
        self._clock = clock
        self._keep_on = keep_on
        self._answered: asyncio.Future[str] | None = None
        self._call: GrpcCall | None = None
        self._runner: asyncio.Task[None] | None = None
        self._lost_for = ""
        self._is_over = False

    def start(self, config: LaneConfig) -> None:
        """Send the clip."""
        name = f"slot {self.clip.id} on {self.address}"
        self._runner = asyncio.create_task(self._run(config), name=name)

    @property
    def runner(self) -> "asyncio.Task[None]":
        """The task that runs the attempt, to wait for its end."""
        assert self._runner is not None
        return self._runner

    def stop(self) -> None:
        """End the stream because the clip is no longer wanted; that cancels it on the worker."""
        if self._runner is not None and not self._is_over:
            self._runner.cancel()

    def give_up(self, reason: str) -> None:
        """Count the attempt as lost, because its instance is silent."""
        self._lost_for = reason
        if self._answered is not None and not self._answered.done():
            self._answered.cancel()

    async def _run(self, config: LaneConfig) -> None:
        answered = self._answered = asyncio.get_running_loop().create_future()
        reason, error = "", ""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                call = self._call = await open_call(
                    self.address, METHOD, self._take, config.keepalive_s, config.tls
                )
            call.send(self._request())
            await asyncio.wait([answered, call.ended], return_when=asyncio.FIRST_COMPLETED)
            if answered.done() and not answered.cancelled():
                error = answered.result()
            elif not call.ended.done():
                reason = self._lost_for or "given up"
            else:
                call.ended.result()
                reason = "the stream ended"
        except TimeoutError:
            reason = f"no connection within {OPEN_TIMEOUT_S:g} s"
        except (CallEnded, BadAnswer, DecodeError) as failure:
            reason = str(failure)
        except Exception as failure:
            lane_log.exception(
                "a slot's stream failed unexpectedly", extra=fields(instance=self.address)
            )
            reason = f"unexpected {type(failure).__name__}"
        finally:
            if self._call is not None:
                await self._call.close()
        self._is_over = True
        if reason:
            self._sink.lost(self, reason)
        elif error:
            self._sink.refused(self, error)
        else:
            self._sink.finished(self)

    def _request(self) -> bytes:
        job = self.clip.job
        left_ms = max(1.0, job.deadline.left_ms(self._clock.now()))
        parameters: dict[str, str | bool | float] = {
            "deadline_ms": left_ms,
            "on_deadline": "degrade" if job.degrade else "error",
            "outputs": ",".join(job.outputs),
        }
        if self._keep_on:
            parameters["keep_on"] = True
        return request(job.recipe_json, f"{self.clip.id}/{job.correlation_id}", parameters)

    def _take(self, messages: list[bytes]) -> None:
        answered = self._answered
        assert answered is not None
        for message in messages:
            answer = read_answer(message)
            if answer is None or answered.done():
                continue
            if answer.error:
                answered.set_result(answer.error)
            elif self._take_event(answer):
                answered.set_result("")

    def _take_event(self, answer: ClipAnswer) -> bool:
        """Process an event. Returns whether it was the last."""
        clip, event = self.clip, answer.event
        kind = event.get("event")
        if clip.ending is not None:
            return False
        if kind == "stage":
            stage, percent = event.get("stage"), event.get("percent")
            if not isinstance(stage, str) or not isinstance(percent, int):
                raise BadAnswer("a stage event without stage and percent")
            clip.progress(stage, percent, self._clock.now())
            return False
        if kind in ("result", "saved"):
            clip.facts = {k: v for k, v in event.items() if k not in _EVENT_FIELDS}
            clip.files = {
                name: data for name, data in answer.tensors.items() if name in OUTPUTS and data
            }
            return bool(kind == "result")
        return False  # an event of a newer worker
