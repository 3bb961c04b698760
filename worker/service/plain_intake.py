"""Takes plain requests: reads, tokenizes and submits them.

It has its own thread, so that a long prompt does not delay a lane.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from protocol import AbortCause, Code, OnDeadline, TokenLogprob, excerpt
from protocol import tensors as names
from protocol.tensors import PARAM_TOKEN
from worker.core import Clock, Job, JobFinished, JobTokens
from worker.errors import ContextOverflow, Unauthenticated, WorkerDraining
from worker.service.access import Secret
from worker.service.call import Call, Responder, Tensors, seconds, strings
from worker.service.emitter import Emitter
from worker.service.plain_request import PlainRequest, parse_plain
from worker.service.replies import JobReply, as_shown
from worker.service.serving import Serving
from worker.settings import WorkerSettings
from worker.text.tokenizer import Tokenizer


class PlainReply:
    """The ``Reply`` to a plain request for ``n`` texts. An error in one text ends the request."""

    def __init__(
        self,
        request: PlainRequest,
        jobs: Sequence[Job],
        responder: Responder,
        tokenizer: Tokenizer,
        cancel: Callable[[Job, AbortCause], None],
    ) -> None:
        """``jobs`` has one job per text. ``cancel`` stops jobs that have no reader."""
        self.responder = responder
        self.choices = [PlainChoice(request, job, tokenizer, self) for job in jobs]
        self._request = request
        self._cancel = cancel
        self.ended = False

    def running_jobs(self) -> list[Job]:
        return [] if self.ended else self._unfinished()

    def flush(self) -> None:
        if self.ended:
            return
        ends = [choice.end for choice in self.choices]
        failed = next((end for end in ends if end is not None and end.code is not None), None)
        if failed is not None and failed.code is not None:
            self._fail(failed.code, failed.message)
        elif None not in ends:
            self.responder.send(self._tensors(), final=True)
            self.ended = True
        elif self._request.stream and any(choice.new_tokens for choice in self.choices):
            self.responder.send(self._tensors())

    def close(self) -> None:
        if not self.ended:
            self._fail(Code.INTERNAL, "the answer could not be sent")

    def _fail(self, code: Code, message: str) -> None:
        self.ended = True
        self.responder.fail(code, message)
        for job in self._unfinished():
            self._cancel(job, AbortCause.CANCEL)

    def _unfinished(self) -> list[Job]:
        return [choice.job for choice in self.choices if choice.end is None]

    def _tensors(self) -> Tensors:
        """Build a response with everything since the last one, and clear that. Every output except
        the prompt token count has one element per text."""
        request, choices = self._request, self.choices
        texts = ["".join(c.pieces) for c in choices]
        tensors: dict[str, Any] = {names.TEXT_OUTPUT: strings(*texts)}
        if names.FINISH_REASON in request.outputs:
            tensors[names.FINISH_REASON] = strings(*[c.finish_reason for c in choices])
        if names.CUMULATIVE_LOGPROB in request.outputs:
            sums = [c.cumulative_logprob for c in choices]
            tensors[names.CUMULATIVE_LOGPROB] = np.array(sums, dtype=np.float32)
        if names.LOGPROBS in request.outputs:
            tensors[names.LOGPROBS] = strings(*[json.dumps(c.logprobs) for c in choices])
        if names.NUM_INPUT_TOKENS in request.outputs:
            count = len(choices[0].job.token_ids)
            tensors[names.NUM_INPUT_TOKENS] = np.array([count], dtype=np.uint32)
        if names.NUM_OUTPUT_TOKENS in request.outputs:
            counts = [c.new_tokens for c in choices]
            tensors[names.NUM_OUTPUT_TOKENS] = np.array(counts, dtype=np.uint32)
        for choice in choices:
            choice.clear()
        return tensors


class PlainChoice(JobReply):
    """One text of a plain request, which is never paused and asks nothing about its prompt."""

    def __init__(
        self, request: PlainRequest, job: Job, tokenizer: Tokenizer, reply: PlainReply
    ) -> None:
        self.job = job
        self.reply = reply
        self.end: JobFinished | None = None
        self.new_tokens = 0
        """Number of tokens not sent yet."""
        self.cumulative_logprob = 0.0
        self._text = tokenizer.stream_for(job.sampling)
        self._tokenizer = tokenizer
        self._stop_in_text = request.stated.include_stop_str_in_output
        self._stopped = False
        self.pieces = [request.prompt] if request.prepend_prompt else []
        """Text that was not sent yet."""
        tells = names.LOGPROBS in request.outputs and request.stated.logprobs is not None
        self.logprobs: list[dict[str, dict[str, Any]]] | None = [] if tells else None

    @property
    def finish_reason(self) -> str:
        """The finish reason in vLLM's spelling; "None" while the text continues."""
        return "None" if self.end is None else self.end.reason.value

    def clear(self) -> None:
        """Forget what has been sent."""
        self.pieces = []
        self.logprobs = None if self.logprobs is None else []
        self.new_tokens = 0

    def tokens(self, event: JobTokens) -> bool:
        if self._stopped:
            return False
        fed = self._text.feed(event.ids)
        count = len(event.ids) if fed.stopped_at is None else fed.stopped_at + 1
        self._stopped = fed.stopped_at is not None
        self.pieces.extend(fed.texts[:count])
        self.new_tokens += count
        if event.logprobs is not None:
            for token_id, logprob in zip(event.ids[:count], event.logprobs, strict=False):
                self.cumulative_logprob += logprob.logprob
                if self.logprobs is not None:
                    self.logprobs.append(self._describe(token_id, logprob))
        return self._stopped

    def finished(self, event: JobFinished) -> None:
        if not self._stopped:
            tail, self._stopped = self._text.flush()
            self.pieces.append(tail)
        if self._stop_in_text:
            ended_by = self._text.stop_token_id
            stop = self._text.stop if ended_by is None else self._token_text(ended_by)
            self.pieces.append(stop)
        self.end = as_shown(event, self._stopped)

    def _describe(self, token_id: int, logprob: TokenLogprob) -> dict[str, dict[str, Any]]:
        """vLLM's form: token id → its logprob, rank and text, with the chosen token first.

        For tokens in the list, the rank is their position there, even among equally likely tokens.
        """
        ranked = {token_id: (logprob.logprob, logprob.rank)}
        for rank, (top_id, top_logprob) in enumerate(logprob.top, start=1):
            ranked[top_id] = top_logprob, rank
        return {
            str(id): {"logprob": value, "rank": rank, "decoded_token": self._token_text(id)}
            for id, (value, rank) in ranked.items()
        }

    def _token_text(self, token_id: int) -> str:
        detokenizer = self._tokenizer.detokenizer()
        return detokenizer.feed([token_id])[0] + detokenizer.flush()


WRONG_PLAIN_TOKEN = f"this worker requires a token: send it as the request parameter {PARAM_TOKEN}"

DEFAULT_DEADLINE_S: Final = 300.0
"""Default deadline of plain requests, in seconds from their arrival."""


class PlainIntake:
    """Takes one worker's plain requests; ``accept`` is called on Triton's request thread."""

    def __init__(
        self,
        serving: Callable[[], Serving],
        settings: WorkerSettings,
        emitter: Emitter,
        clock: Clock,
    ) -> None:
        """``serving`` returns the currently served model."""
        self._serving = serving
        self._emitter = emitter
        self._clock = clock
        self._token = Secret(settings.plain.token, "a plain request was", clock)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidegate-intake")

    def accept(self, call: Call) -> None:
        """Take over one request. Never raises: an error becomes the response."""
        self._thread.submit(self._run, call, self._clock())

    def close(self) -> None:
        """Submit the accepted requests, then end the thread. Idempotent."""
        self._thread.shutdown(wait=True)

    def _run(self, call: Call, received: float) -> None:
        try:
            self._submit(call, received)
        except Exception as error:
            self._emitter.fail(call.responder, error)

    def _submit(self, call: Call, received: float) -> None:
        if not self._token.admits(call.parameters.get(PARAM_TOKEN)):
            raise Unauthenticated(WRONG_PLAIN_TOKEN)
        if self._emitter.draining:
            raise WorkerDraining("the worker is draining; retry elsewhere")
        serving = self._serving()
        card, tokenizer = serving.card, serving.tokenizer
        request = parse_plain(
            call,
            default_deadline_ms=1000 * DEFAULT_DEADLINE_S,
            unix_ms=time.time() * 1000,
            vocab_size=card.vocab_size,
            defaults=card.sampling_defaults,
        )
        # Tokenizing a few megabytes would take a second; the length alone may prove too much.
        if len(request.prompt) > card.context_tokens * tokenizer.longest_token_bytes:
            raise ContextOverflow(
                f"the prompt has {len(request.prompt)} characters, but this model's maximum context"
                f" length is {card.context_tokens} tokens, which cannot stand for as"
                f" many{card.context_note}"
            )
        token_ids = tokenizer.encode(request.prompt)
        fits = request.sampling_for(len(token_ids), card)
        due_at = received + request.budget_ms / 1000
        stated = request.stated
        finishes = stated.on_deadline is OnDeadline.FINISH
        jobs = [
            Job(
                token_ids=token_ids,
                sampling=sampling,
                deadline=due_at,
                on_deadline=stated.on_deadline,
                correlation_id=excerpt(call.request_id, 128),
                first_token_by=received + seconds(stated.first_token_ms),
                token_gap_s=seconds(stated.token_gap_ms),
                constraint=serving.constraint(
                    request.grammar,
                    sampling,
                    finish_by=due_at if finishes else None,
                    clock=self._clock,
                ),
            )
            for sampling in map(fits.for_choice, range(stated.n))
        ]
        reply = PlainReply(request, jobs, call.responder, tokenizer, serving.engine.cancel)
        self._emitter.job_replies.update({choice.job: choice for choice in reply.choices})
        self._emitter.post(lambda: self._emitter.watch(reply))
        for job in jobs:
            serving.engine.submit(job)
