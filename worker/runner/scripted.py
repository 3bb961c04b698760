"""A runner that answers each prompt from a script. No torch.

Everything around the model is real: tokens, chat template, grammars, tool calls, deadlines.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol import PromptLogprobs, TokenLogprob
from worker.grammar.masks import MaskedRow, MaskMaker
from worker.runner.base import BuiltRunner
from worker.runner.script import Script
from worker.runner.synthetic import certain, read_prompt
from worker.scheduler.plan import Plan, Row, StepResult
from worker.scheduler.request import Request
from worker.settings import BLOCK_TOKENS, WorkerSettings
from worker.text import Tokenizer

_TOKENS_PER_STEP: Final = 8
_WHOLE_CONTEXTS: Final = 4
"""Default number of full contexts in the KV pool. It has no KV memory, but its bookkeeping takes 50
bytes per block."""
_CLOSING: Final = ("}", "]", '"', ",", ":")
_CLOSING_TEXT: Final = ('"', *_CLOSING)
"""Texts that end JSON soonest, within a string and between values."""
_ONLY_IN_TEXT: Final = "~"
"""A character that JSON allows only in strings."""


class ScriptedRunner:
    """A ``Runner`` that yields a script's answer, then the end token. If a grammar forbids the next
    token, it completes the answer with as few tokens as the grammar allows.
    """

    def __init__(
        self,
        script: Script,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        *,
        vocab_size: int,
        slots: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``slots`` is the maximum number of running requests."""
        self._script = script
        self._tokenizer = tokenizer
        self._ends = tuple(eos_token_ids)
        self._sleep = sleep
        self._masks = MaskMaker(vocab_size, eos_token_ids)
        self._closing = self._ids(_CLOSING)
        self._closing_text = self._ids(_CLOSING_TEXT)
        self._only_in_text = self._ids([_ONLY_IN_TEXT])
        self._answers: list[tuple[Request | None, list[int]]] = [(None, [])] * slots

    def execute(self, plan: Plan) -> StepResult:
        ids: list[list[int]] = []
        logprobs: list[list[TokenLogprob] | None] = []
        prompts: dict[int, list[PromptLogprobs]] = {}
        for index, row in enumerate(plan.rows):
            asked = row.request.job.sampling
            if asked.prompt_logprobs is not None and (read := read_prompt(row)):
                prompts[index] = [read]
            new = self._tokens(row) if row.samples else []
            ids.append(new)
            top = asked.logprobs
            logprobs.append(None if top is None else [certain(token, top) for token in new])
        if self._script.step_ms:
            self._sleep(self._script.step_ms / 1e3)
        return StepResult(ids, logprobs if any(logprobs) else None, prompts)

    def close(self) -> None:
        self._masks.close()

    def _tokens(self, row: Row) -> list[int]:
        request = row.request
        answer = self._answer(request)
        own = request.tokens[request.prompt_tokens - request.job.begun_tokens :]
        if request.job.constraint is not None:
            return [self._constrained(request, own, self._token(request, answer, len(own)))]
        room = min(_TOKENS_PER_STEP, request.limit_tokens - len(request.tokens))
        new: list[int] = []
        while len(new) < room and (not new or new[-1] not in self._ends):
            new.append(self._token(request, answer, len(own) + len(new)))
        return new

    def _token(self, request: Request, answer: Sequence[int], position: int) -> int:
        """The token at ``position`` of an answer; an answer that may not end yet starts over."""
        asked = request.job.sampling
        least = asked.min_tokens + request.job.begun_tokens
        may_end = not asked.ignore_eos and position >= least
        if not answer or (position >= len(answer) and may_end):
            return self._ends[0]
        return answer[position % len(answer)]

    def _constrained(self, request: Request, own: Sequence[int], wanted: int) -> int:
        """The token ``wanted`` while the text follows the script and the grammar allows it;
        otherwise a token that brings the text to its end."""
        constraint = request.job.constraint
        assert constraint is not None
        generated = own[request.job.begun_tokens :]
        bars_end = len(generated) < request.job.sampling.min_tokens
        (words,) = self._masks.make([MaskedRow(0, constraint, generated, bars_end)]).words
        answer = self._answer(request)
        is_scripted = list(own) == answer[: len(own)]
        in_text = any(_is_set(words, token) for token in self._only_in_text)
        closing = self._closing_text if in_text else self._closing
        for token in (*([wanted] if is_scripted else []), *self._ends, *closing):
            if _is_set(words, token):
                return token
        return _lowest(words, self._ends[0])

    def _ids(self, characters: Sequence[str]) -> list[int]:
        """Token ids of those ``characters`` that are tokens."""
        encoded = [self._tokenizer.encode(one, add_special_tokens=False) for one in characters]
        return [ids[0] for ids in encoded if len(ids) == 1]

    def _answer(self, request: Request) -> list[int]:
        """The script's answer, looked up once for each request in a slot."""
        owner, answer = self._answers[request.slot]
        if owner is not request:
            answer = self._look_up(request)
            self._answers[request.slot] = request, answer
        return answer

    def _look_up(self, request: Request) -> list[int]:
        messages: list[list[int]] = [[]]
        for token in request.tokens[: request.prompt_tokens - request.job.begun_tokens]:
            if token in self._ends:
                messages.append([])
            else:
                messages[-1].append(token)
        texts = [self._text(message) for message in messages]
        latest = texts[_after_the_last_answer(messages) :]
        answer = self._script.answer("\n".join(texts), "\n".join(latest))
        return self._tokenizer.encode(answer, add_special_tokens=False)

    def _text(self, ids: Sequence[int]) -> str:
        detokenizer = self._tokenizer.detokenizer(skip_special=False)
        return "".join(detokenizer.feed(ids)) + detokenizer.flush()


def build_scripted_runner(
    settings: WorkerSettings,
    script: Script,
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    vocab_size: int,
) -> BuiltRunner:
    """Build a runner for ``script``. Raises ``ValueError`` for a model without an end token."""
    if not eos_token_ids:
        raise ValueError(
            f"{settings.model_path}: no end token for scripted answers; name one in its config.json"
        )
    runner = ScriptedRunner(
        script, tokenizer, eos_token_ids, vocab_size=vocab_size, slots=settings.max_running
    )
    blocks = settings.kv.blocks or _WHOLE_CONTEXTS * -(-script.context_tokens // BLOCK_TOKENS)
    return BuiltRunner(runner, blocks, "none", "none")


def _is_set(words: NDArray[np.uint32], token: int) -> bool:
    return bool(words[token // 32] >> (token % 32) & 1)


def _lowest(words: NDArray[np.uint32], otherwise: int) -> int:
    """The lowest id whose bit is set in ``words``; ``otherwise`` if there is none."""
    bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return int(bits[0]) if len(bits) else otherwise


def _after_the_last_answer(messages: Sequence[list[int]]) -> int:
    """Index of the first message after the model's last answer; 0 if there is no answer yet.
    Messages end with end tokens; an answer begins like the text after the last end token."""
    *said, head = messages
    for index in range(len(said) - 1, -1, -1):
        if head and said[index][: len(head)] == head:
            return index + 1
    return 0
