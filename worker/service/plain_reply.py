"""Answers a plain request, in deltas or one piece, by tensors of Triton's vLLM contract."""

import json
from typing import Any

import numpy as np

from worker.core import Job, JobFinished, JobPrompt, JobStarted, JobTokens
from worker.protocol import Code, TokenLogprob
from worker.protocol import tensors as names
from worker.service.call import Responder, Tensors, strings
from worker.service.plain_request import PlainRequest
from worker.service.replies import as_shown
from worker.text.text_stream import TextStream
from worker.text.tokenizer import Tokenizer


class PlainReply:
    """A ``Reply`` and ``JobReply`` in one, as each plain request has its own response sender."""

    def __init__(
        self,
        request: PlainRequest,
        job: Job,
        text: TextStream,
        responder: Responder,
        tokenizer: Tokenizer,
    ) -> None:
        self.request = request
        self.job = job
        self.responder = responder
        self._text = text
        self._tokenizer = tokenizer
        self._stopped = False
        self._finished: JobFinished | None = None
        self._pieces = [request.prompt] if request.prepend_prompt else []
        self._new_tokens = 0
        self._cumulative = 0.0
        self._logprobs: list[dict[str, dict[str, Any]]] | None = (
            [] if request.logprobs and request.states_logprobs else None
        )
        self._ended = False

    @property
    def reply(self) -> "PlainReply":
        return self

    @property
    def ended(self) -> bool:
        return self._ended

    def running_jobs(self) -> list[Job]:
        return [] if self._ended else [self.job]

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
        self._new_tokens += count
        if event.logprobs is not None:
            for token_id, logprob in zip(event.ids[:count], event.logprobs, strict=False):
                self._cumulative += logprob.logprob
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
        self._finished = as_shown(event, self._stopped)

    def flush(self) -> None:
        if self._ended:
            return
        end = self._finished
        if end is None:
            if self.request.stream and self._new_tokens:
                self.responder.send(self._tensors("None"))
            return
        if end.code is None:
            self.responder.send(self._tensors(end.reason.value), final=True)
        else:
            self.responder.fail(end.code, end.message)
        self._ended = True

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self.responder.fail(Code.INTERNAL, "the answer could not be sent")

    def _tensors(self, finish_reason: str) -> Tensors:
        """One response with everything since the last one, which is cleared."""
        request = self.request
        tensors: dict[str, Any] = {names.TEXT_OUTPUT: strings("".join(self._pieces))}
        if request.finish_reason:
            tensors[names.FINISH_REASON] = strings(finish_reason)
        if request.cumulative_logprob:
            tensors[names.CUMULATIVE_LOGPROB] = np.array([self._cumulative], dtype=np.float32)
        if request.logprobs:
            tensors[names.LOGPROBS] = strings(json.dumps(self._logprobs))
        if request.num_input_tokens:
            count = len(self.job.token_ids)
            tensors[names.NUM_INPUT_TOKENS] = np.array([count], dtype=np.uint32)
        if request.num_output_tokens:
            tensors[names.NUM_OUTPUT_TOKENS] = np.array([self._new_tokens], dtype=np.uint32)
        self._pieces, self._new_tokens = [], 0
        if self._logprobs is not None:
            self._logprobs = []
        return tensors

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
