"""Answers a plain request, in deltas or one piece, by tensors of Triton's vLLM contract."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from protocol import AbortCause, Code, TokenLogprob
from protocol import tensors as names
from worker.core import Job, JobFinished, JobPrompt, JobStarted, JobTokens
from worker.service.call import Responder, Tensors, strings
from worker.service.plain_request import PlainRequest
from worker.service.replies import as_shown
from worker.text.tokenizer import Tokenizer


class PlainReply:
    """The ``Reply`` to a plain request, of ``n`` texts. An error of one ends the request."""

    def __init__(
        self,
        request: PlainRequest,
        jobs: Sequence[Job],
        responder: Responder,
        tokenizer: Tokenizer,
        cancel: Callable[[Job, AbortCause], None],
    ) -> None:
        """``jobs``: one for each text. ``cancel`` stops those whose texts nobody can get."""
        self.responder = responder
        self.choices = [PlainChoice(request, job, tokenizer, self) for job in jobs]
        self._request = request
        self._cancel = cancel
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def running_jobs(self) -> list[Job]:
        return [] if self._ended else self._unfinished()

    def flush(self) -> None:
        if self._ended:
            return
        ends = [choice.end for choice in self.choices]
        failed = next((end for end in ends if end is not None and end.code is not None), None)
        if failed is not None and failed.code is not None:
            self._fail(failed.code, failed.message)
        elif None not in ends:
            self.responder.send(self._tensors(), final=True)
            self._ended = True
        elif self._request.stream and any(choice.new_tokens for choice in self.choices):
            self.responder.send(self._tensors())

    def close(self) -> None:
        if not self._ended:
            self._fail(Code.INTERNAL, "the answer could not be sent")

    def _fail(self, code: Code, message: str) -> None:
        self._ended = True
        self.responder.fail(code, message)
        for job in self._unfinished():
            self._cancel(job, AbortCause.CANCEL)

    def _unfinished(self) -> list[Job]:
        return [choice.job for choice in self.choices if choice.end is None]

    def _tensors(self) -> Tensors:
        """One response with everything since the last one, which is cleared. All outputs but the
        prompt's count have an element for each text."""
        request, choices = self._request, self.choices
        tensors: dict[str, Any] = {names.TEXT_OUTPUT: strings(*[c.take_text() for c in choices])}
        if request.finish_reason:
            tensors[names.FINISH_REASON] = strings(*[c.finish_reason for c in choices])
        if request.cumulative_logprob:
            sums = [c.cumulative_logprob for c in choices]
            tensors[names.CUMULATIVE_LOGPROB] = np.array(sums, dtype=np.float32)
        if request.logprobs:
            tensors[names.LOGPROBS] = strings(*[json.dumps(c.take_logprobs()) for c in choices])
        if request.num_input_tokens:
            count = len(choices[0].job.token_ids)
            tensors[names.NUM_INPUT_TOKENS] = np.array([count], dtype=np.uint32)
        if request.num_output_tokens:
            counts = [c.new_tokens for c in choices]
            tensors[names.NUM_OUTPUT_TOKENS] = np.array(counts, dtype=np.uint32)
        for choice in choices:
            choice.new_tokens = 0
        return tensors


class PlainChoice:
    """The ``JobReply`` of one of a plain request's texts."""

    def __init__(
        self, request: PlainRequest, job: Job, tokenizer: Tokenizer, reply: PlainReply
    ) -> None:
        self.job = job
        self.reply = reply
        self.end: JobFinished | None = None
        self.new_tokens = 0
        """Tokens that were not sent yet."""
        self.cumulative_logprob = 0.0
        self._text = tokenizer.stream_for(job.sampling)
        self._tokenizer = tokenizer
        self._stop_in_text = request.stop_in_text
        self._stopped = False
        self._pieces = [request.prompt] if request.prepend_prompt else []
        self._logprobs: list[dict[str, dict[str, Any]]] | None = (
            [] if request.logprobs and request.states_logprobs else None
        )

    @property
    def finish_reason(self) -> str:
        """vLLM's spelling: "None" while the text goes on."""
        return "None" if self.end is None else self.end.reason.value

    def take_text(self) -> str:
        """The text since the last call."""
        text = "".join(self._pieces)
        self._pieces = []
        return text

    def take_logprobs(self) -> list[dict[str, dict[str, Any]]] | None:
        """Log-probabilities of the tokens since the last call; None where none are asked for."""
        taken = self._logprobs
        if taken is not None:
            self._logprobs = []
        return taken

    def started(self, event: JobStarted) -> None:
        pass

    def prompt(self, event: JobPrompt) -> None:
        """Do nothing: plain requests cannot ask for a prompt's log-probabilities."""

    def tokens(self, event: JobTokens) -> bool:
        if self._stopped:
            return False
        fed = self._text.feed(event.ids)
        count = len(event.ids) if fed.stopped_at is None else fed.stopped_at + 1
        self._stopped = fed.stopped_at is not None
        self._pieces.extend(fed.texts[:count])
        self.new_tokens += count
        if event.logprobs is not None:
            for token_id, logprob in zip(event.ids[:count], event.logprobs, strict=False):
                self.cumulative_logprob += logprob.logprob
                if self._logprobs is not None:
                    self._logprobs.append(self._describe(token_id, logprob))
        return self._stopped

    def paused(self) -> None:
        """Do nothing: plain requests cannot be paused."""

    def resumed(self) -> None: ...

    def finished(self, event: JobFinished) -> None:
        if not self._stopped:
            tail, self._stopped = self._text.flush()
            self._pieces.append(tail)
        if self._stop_in_text:
            self._pieces.append(self._stop_text())
        self.end = as_shown(event, self._stopped)

    def _stop_text(self) -> str:
        """The stop string or token that ended the text; empty where neither did."""
        ended_by = self._text.stop_token_id
        return self._text.stop if ended_by is None else self._token_text(ended_by)

    def _describe(self, token_id: int, logprob: TokenLogprob) -> dict[str, dict[str, Any]]:
        """vLLM's form: token id → its logprob, rank and text; the chosen token's comes first.

        For tokens in the list the rank is their place there, even among equally likely ones.
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
