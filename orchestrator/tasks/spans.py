"""Traces (OR-16): a request as OpenTelemetry spans, children of the caller's span.

    POST /v1/chat/completions          the HTTP request, until its answer is written
     └ chat llm                        the task: outcome, tokens, budget
        ├ admission                    tokenizing, limits, feasibility
        ├ queue
        └ lane                         one per attempt, with its instance
           ├ wait                      in the worker, until it began
           ├ prefill
           └ decode                    all tokens, never one span each

Spans are created after their phase ends, from times that are recorded anyway. A worker's times are
in its ``End``, so no span code runs per token, and workers need no OpenTelemetry. A span has the
same data as a log line: no prompt, no text, no query string.
"""

import asyncio
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from orchestrator.clock import Clock
from orchestrator.tasks.metrics import PROVIDER, operation_of
from orchestrator.tasks.task import Task
from orchestrator.telemetry.log import Field, service_log
from orchestrator.telemetry.trace_context import TraceContext
from protocol import End, Outcome

CLOSE_S: Final = 2.0
"""Seconds to send the last spans at shutdown."""
SET_S: Final = 0.05
"""Difference in seconds between wall and monotonic time that shows a changed clock."""
_NO_FAULT = (Outcome.MET, Outcome.PARTIAL, Outcome.ABORTED)


class Tracing:
    """Creates spans; one per orchestrator. Times are seconds of the clock."""

    def __init__(self, provider: TracerProvider, clock: Clock) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tidegate")
        self._clock = clock
        self._offset_s = clock.unix() - clock.now()

    def of_request(self, name: str, parent: TraceContext | None) -> "RequestSpan":
        """Start the span of an HTTP request, as a child of the caller's span if there is one."""
        context = None if parent is None else context_of(parent)
        return RequestSpan(self.start(name, context, self._clock.now(), SpanKind.SERVER), self)

    def of_task(self, task: Task) -> "TaskSpans | None":
        """Spans of a task, children of its request's span; None if the trace is not sampled."""
        trace = task.job.trace
        return None if trace is None or not trace.sampled else TaskSpans(self, task, trace)

    async def close(self) -> None:
        """Send the remaining spans; waits at most ``CLOSE_S`` seconds."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set)

        # A daemon thread: a hanging receiver must not block the exit.
        threading.Thread(target=shut_down, name="tidegate-traces", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), CLOSE_S)
        except TimeoutError:
            service_log.warning("the last traces were not sent: the OTLP receiver does not answer")

    def add(
        self,
        name: str,
        parent: Context,
        begun: float,
        ended: float,
        attributes: Mapping[str, Field],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
    ) -> Span:
        """Create the span of an ended phase. ``error`` is an error code, empty if none."""
        span = self.start(name, parent, begun, kind)
        span.set_attributes(_stated(attributes))
        if error:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._unix_ns(max(begun, ended)))
        return span

    def end(self, span: Span) -> None:
        span.end(self._unix_ns(self._clock.now()))

    def start(
        self, name: str, parent: Context | None, begun: float, kind: SpanKind = SpanKind.INTERNAL
    ) -> Span:
        """Start a span that gets children before it ends."""
        return self._tracer.start_span(name, parent, kind, start_time=self._unix_ns(begun))

    def _unix_ns(self, at: float) -> int:
        # One offset for all spans keeps their order; a new one if the wall clock was set.
        offset_s = self._clock.unix() - self._clock.now()
        if abs(offset_s - self._offset_s) > SET_S:
            self._offset_s = offset_s
        return int(1e9 * (at + self._offset_s))


class RequestSpan:
    """The span of an HTTP request, until its answer is written."""

    def __init__(self, span: Span, tracing: Tracing) -> None:
        self._span = span
        self._tracing = tracing
        made = span.get_span_context()
        self.trace = TraceContext(
            f"{made.trace_id:032x}", f"{made.span_id:016x}", made.trace_flags.sampled
        )

    def end(self, attributes: Mapping[str, Field], *, failed: bool) -> None:
        """End the span: the answer was written, or never will be."""
        self._span.set_attributes(_stated(attributes))
        if failed:
            self._span.set_status(Status(StatusCode.ERROR))
        self._tracing.end(self._span)


class TaskSpans:
    """The spans of one task. They may end in any order: a worker confirms the end of a stopped job
    after its task has ended."""

    def __init__(self, tracing: Tracing, task: Task, parent: TraceContext) -> None:
        self._tracing = tracing
        operation = operation_of(task.job.api)
        self._span = tracing.start(operation, context_of(parent), task.marks.received)
        self._context = set_span_in_context(self._span)
        self._attempts = 0

    def attempt_ended(
        self, address: str, dispatched_at: float, first_token_at: float, end: End | None, now: float
    ) -> None:
        """Make spans of an attempt that ended, or, without ``end``, was lost."""
        self._attempts += 1
        error = "instance_lost" if end is None else (end.code or "")
        add = self._tracing.add
        facts: dict[str, Field] = {
            "server.address": address,
            "tidegate.attempt": self._attempts,
            "tidegate.finish_reason": None if end is None else end.reason.value,
            "tidegate.late_tokens": None if end is None else end.late_tokens,
        }
        kind = SpanKind.CLIENT
        lane = add("lane", self._context, dispatched_at, now, facts, kind=kind, error=error)
        if end is None:
            return
        # The worker reports durations, not times: the first token separates prefill and decode.
        parent, prefilled = set_span_in_context(lane), first_token_at
        if not dispatched_at <= prefilled <= now:
            prefilled = now - end.decode_ms / 1000
        began = max(dispatched_at, prefilled - end.prefill_ms / 1000)
        waited = max(dispatched_at, began - end.wait_ms / 1000)
        add("wait", parent, waited, began, {})
        if end.prefill_ms:
            counts = {
                "gen_ai.usage.input_tokens": end.prompt_tokens,
                "tidegate.cached_tokens": end.cached_tokens,
            }
            add("prefill", parent, began, prefilled, counts)
        if end.decode_ms:
            ended = min(now, prefilled + end.decode_ms / 1000)
            counts = {"gen_ai.usage.output_tokens": end.completion_tokens}
            add("decode", parent, prefilled, ended, counts)

    def ended(self, task: Task) -> None:
        ending, job, marks, span = task.ending, task.job, task.marks, self._span
        assert ending is not None
        if task.model:
            span.update_name(f"{operation_of(job.api)} {task.served_name}")
        code = ending.error.code.value if ending.error is not None else None
        budget = ending.budget
        attributes: dict[str, Field] = {
            "gen_ai.operation.name": operation_of(job.api),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": task.served_name or None,
            "gen_ai.usage.input_tokens": task.prompt_tokens,
            "gen_ai.usage.output_tokens": task.completion_tokens,
            "error.type": code,
            "tidegate.api": job.api.value,
            "tidegate.task_id": task.id,
            "tidegate.correlation_id": task.correlation_id,
            "tidegate.class": job.priority.value,
            "tidegate.outcome": ending.outcome.value,
            "tidegate.missed_part": ending.missed_part.value if ending.missed_part else None,
            "tidegate.deadline_ms": round(task.deadline.left_ms(marks.received), 3),
            "tidegate.left_ms": round(budget.left_ms, 3),
            "tidegate.attempts": task.attempts + bool(marks.dispatched),
        }
        span.set_attributes(_stated(attributes))
        span.set_attribute("gen_ai.response.finish_reasons", [ending.finish_reason.value])
        if ending.outcome not in _NO_FAULT:
            span.set_status(Status(StatusCode.ERROR))
        add = self._tracing.add
        add("admission", self._context, marks.received, marks.queued or marks.ended, {})
        if marks.queued:
            add("queue", self._context, marks.queued, marks.dispatched or marks.ended, {})
        self._tracing.end(span)


def _stated(attributes: Mapping[str, Field]) -> dict[str, str | int | float | bool]:
    return {key: value for key, value in attributes.items() if value is not None}


def context_of(trace: TraceContext) -> Context:
    """The context for children of a trace's span."""
    flags = TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT)
    made = SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), True, flags)
    return set_span_in_context(NonRecordingSpan(made))
