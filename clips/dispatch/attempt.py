"""One clip on one instance. It has its own stream; ending the stream cancels the clip."""

import asyncio
from typing import Any

from google.protobuf.message import DecodeError

from clips.dispatch.forecast import Begun
from clips.dispatch.task import OUTPUTS, ClipTask
from clips.dispatch.wire import METHOD, BadAnswer, ClipAnswer, read_answer, request
from orchestrator.clock import Clock
from orchestrator.lanes import LaneConfig
from orchestrator.lanes.config import OPEN_TIMEOUT_S
from orchestrator.lanes.grpc_call import CallEnded, GrpcCall, open_call
from orchestrator.telemetry.log import fields, lane_log

_EVENT_FIELDS = frozenset(("event", "stage", "percent"))


class AttemptLost(Exception):
    """The instance was lost; the message says how."""


class ClipAttempt:
    """A clip that is sent to ``address``; ``begun`` is its progress. With ``keep_on``, only its
    deadline stops it."""

    def __init__(
        self, clip: ClipTask, address: str, begun: Begun, clock: Clock, *, keep_on: bool = False
    ) -> None:
        self.clip = clip
        self.address = address
        self.begun = begun
        self.runner: asyncio.Task[None] | None = None
        """The task that runs the attempt."""
        self._clock = clock
        self._keep_on = keep_on
        self._answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._lost_for = ""

    def stop(self) -> None:
        """End the stream because the clip is no longer wanted; that cancels it on the worker."""
        if self.runner is not None:
            self.runner.cancel()

    def give_up(self, reason: str) -> None:
        """Count the attempt as lost, because its instance is silent."""
        self._lost_for = reason
        self._answered.cancel()

    async def run(self, config: LaneConfig) -> str:
        """Send the clip and wait for its end. Returns the error with which the worker, or Triton,
        ended it; empty if the clip is complete. Raises ``AttemptLost``."""
        call: GrpcCall | None = None
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                call = await open_call(
                    self.address, METHOD, self._take, config.keepalive_s, config.tls
                )
            call.send(self._request())
            either: list[asyncio.Future[Any]] = [self._answered, call.ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._answered.cancelled():
                raise AttemptLost(self._lost_for)
            if self._answered.done():
                return self._answered.result()
            call.ended.result()
            raise AttemptLost("the stream ended")
        except TimeoutError:
            raise AttemptLost(f"no connection within {OPEN_TIMEOUT_S:g} s") from None
        except AttemptLost:
            raise
        except (CallEnded, BadAnswer, DecodeError) as failure:
            raise AttemptLost(str(failure)) from None
        except Exception as failure:
            lane_log.exception(
                "a slot's stream failed unexpectedly", extra=fields(instance=self.address)
            )
            raise AttemptLost(f"unexpected {type(failure).__name__}") from None
        finally:
            if call is not None:
                await call.close()

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
        for message in messages:
            answer = read_answer(message)
            if answer is None or self._answered.done():
                continue
            if answer.error:
                self._answered.set_result(answer.error)
            elif self._take_event(answer):
                self._answered.set_result("")

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
