"""Takes plain requests: reads, tokenises and submits them.

It has a thread of its own, so that a long prompt does not delay a lane.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from protocol import InvalidSampling, OnDeadline, excerpt
from protocol.tensors import PARAM_TOKEN
from worker.core import Clock, Job
from worker.errors import ContextOverflow, RequestError, Unauthenticated, WorkerDraining
from worker.log import service_log
from worker.service.access import Secret
from worker.service.call import Call, seconds
from worker.service.emitter import Emitter
from worker.service.plain_reply import PlainReply
from worker.service.plain_request import parse_plain
from worker.service.serving import Serving
from worker.settings import WorkerSettings

WRONG_PLAIN_TOKEN = f"this worker asks for a token: state it as the request parameter {PARAM_TOKEN}"

DEFAULT_DEADLINE_S: Final = 300.0
"""Deadline of plain requests that state none, in seconds from their arrival."""


class PlainIntake:
    """Takes one worker's plain requests; ``accept`` is called on Triton's request thread."""

    def __init__(
        self,
        serving: Callable[[], Serving],
        settings: WorkerSettings,
        emitter: Emitter,
        clock: Clock,
    ) -> None:
        """``serving`` returns the model that is served now."""
        self._serving = serving
        self._emitter = emitter
        self._clock = clock
        self._token = Secret(settings.plain.token, "a plain request was", clock)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidegate-intake")

    def accept(self, call: Call) -> None:
        """Take over one request. Never raises: an error becomes its answer."""
        self._thread.submit(self._run, call, self._clock())

    def close(self) -> None:
        """Submit what was accepted, then end the thread. Idempotent."""
        self._thread.shutdown(wait=True)

    def _run(self, call: Call, received: float) -> None:
        try:
            self._submit(call, received)
        except (RequestError, InvalidSampling) as error:
            self._emitter.fail(call.responder, error)
        except Exception as error:
            service_log.exception("plain request could not be read")
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
        _check_length(request.prompt, serving)
        token_ids = tokenizer.encode(request.prompt)
        fits = request.sampling_for(len(token_ids), card)
        due_at = received + request.budget_ms / 1000
        finishes = request.on_deadline is OnDeadline.FINISH
        jobs = [
            Job(
                token_ids=token_ids,
                sampling=sampling,
                deadline=due_at,
                on_deadline=request.on_deadline,
                correlation_id=excerpt(call.request_id, 128),
                first_token_by=received + seconds(request.first_token_ms),
                token_gap_s=seconds(request.token_gap_ms),
                constraint=serving.constraints.of(
                    request.grammar,
                    sampling,
                    finish_by=due_at if finishes else None,
                    clock=self._clock,
                ),
            )
            for sampling in map(fits.for_choice, range(request.n))
        ]
        reply = PlainReply(request, jobs, call.responder, tokenizer, serving.engine.cancel)
        self._emitter.job_replies.update({choice.job: choice for choice in reply.choices})
        self._emitter.post(lambda: self._emitter.watch(reply))
        for job in jobs:
            serving.engine.submit(job)


def _check_length(prompt: str, serving: Serving) -> None:
    """Raise ``ContextOverflow`` where that is certain without tokenising, which takes a second for
    a few megabytes."""
    card = serving.card
    if len(prompt) > card.context_tokens * serving.tokenizer.longest_token_bytes:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} characters, but this model's maximum context length is "
            f"{card.context_tokens} tokens, which cannot stand for as many{card.context_note}"
        )
