"""Reads a task's prompt for its model: token ids, prefix hashes, images and grammar."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from orchestrator.admission.grammars import GrammarCheck
from orchestrator.admission.images import ImageGate
from orchestrator.clock import Clock
from orchestrator.errors import DeadlineExceeded, InvalidRequest
from orchestrator.instances.registry import Registry
from orchestrator.prompts.encoder import INLINE_HASH_TOKENS, PromptEncoder
from orchestrator.prompts.kinds import bytes_of, is_short
from orchestrator.prompts.stage import EncodingStage
from orchestrator.prompts.turns import images_of
from orchestrator.tasks.deadline import Deadline, Part
from orchestrator.tasks.image import Image
from orchestrator.tasks.job import Prompt
from orchestrator.tasks.prompt_kind import kind_of
from orchestrator.tasks.task import Task
from protocol import Grammar, ModelCard


class Reading(NamedTuple):
    """A prompt as a model reads it, to reuse for other tasks with the same prompt."""

    encoder: PromptEncoder
    token_ids: Sequence[int]
    prefix_hashes: Sequence[bytes]
    images: Sequence[Image]


def reading_of(task: Task, encoder: PromptEncoder) -> Reading:
    """The reading of the prompt of ``task``, which is prepared but not submitted yet."""
    return Reading(encoder, task.token_ids, task.prefix_hashes, task.images)


class PromptReader:
    """Reads prompts until their deadlines; long ones on a thread."""

    def __init__(self, registry: Registry, encoding: EncodingStage, clock: Clock) -> None:
        self.grammars = GrammarCheck()
        self.images = ImageGate()
        self._registry = registry
        self.encoding = encoding
        self._clock = clock

    async def read(
        self, task: Task, encoder: PromptEncoder, prompt: Prompt, reading: Reading | None = None
    ) -> None:
        """Fill in the prompt's facts on ``task``. ``reading``: that of another task with the same
        prompt. Raises ``TidegateError``."""
        if reading is not None and reading.encoder is encoder:
            task.token_ids, task.prefix_hashes = reading.token_ids, reading.prefix_hashes
            task.images = reading.images  # the same bytes, counted once
        else:
            if images := images_of(prompt):
                self._take_images(task, images)
            task.token_ids = await self._encode(task, encoder, prompt)
        if task.job.prompt_ends:
            prompt_end = encoder.tokens.end_of(task.token_ids).rstrip()
            for tag, grammar in task.job.prompt_ends:
                if prompt_end.endswith(tag):
                    task.job = replace(task.job, grammar=grammar)
        task.prompt_tokens = len(task.token_ids)
        task.prompt_kind = kind_of(prompt, task.job.grammar)
        task.block_tokens = encoder.card.block_tokens
        prefixes = self._registry.prefixes
        if (
            not task.prefix_hashes
            and prefixes
            and task.block_tokens
            # Prompt logprobs need every token computed, so no prefix is reused.
            and task.job.sampling.prompt_logprobs is None
        ):
            task.prefix_hashes = await self._prefix_hashes(task, encoder)
        cached_blocks = prefixes.longest(task.prefix_hashes).values()
        task.likely_cached = task.prompt_tokens_in(max(cached_blocks, default=0))

    async def check_grammar(self, task: Task, grammar: Grammar, card: ModelCard) -> None:
        """Raise ``TidegateError`` for a grammar that is unusable or cannot be checked in time."""
        check = self.grammars
        check.require(grammar, card, task.sampling.ignore_eos)
        if check.is_known(grammar):
            return
        due_at, part = _due(task)
        try:
            async with asyncio.timeout(max(0.0, due_at - self._clock.now())):
                await check.find(grammar, task.job.tenant)
        except TimeoutError:
            late_s = self._clock.now() - due_at
            raise DeadlineExceeded.before("the grammar was checked", late_s, part) from None
        check.require(grammar, card, task.sampling.ignore_eos)

    async def token_ids(
        self, encoder: PromptEncoder, prompt: Prompt, deadline: Deadline, tenant: str
    ) -> Sequence[int]:
        """A prompt's token ids, exactly as a request gets them. Raises ``TidegateError``."""
        self.images.check(images_of(prompt))
        return await self._ids(encoder, prompt, deadline.at, "", tenant)

    def _take_images(self, task: Task, images: Sequence[Image]) -> None:
        """Attach these images to a task. Raises ``InvalidRequest`` or ``QueueFull``."""
        self.images.check(images)
        if task.job.durable:
            raise InvalidRequest(
                "a durable task cannot have images: the journal keeps a prompt's tokens but not its"
                " images, so no process could continue it; send durable: false",
                field="durable",
            )
        self.images.take(task, images)

    async def _encode(self, task: Task, encoder: PromptEncoder, prompt: Prompt) -> Sequence[int]:
        return await self._ids(encoder, prompt, *_due(task), task.job.tenant)

    async def _ids(
        self, encoder: PromptEncoder, prompt: Prompt, due_at: float, part: str, tenant: str
    ) -> Sequence[int]:
        if is_short(prompt):
            return encoder.encode(prompt)
        steps, size = encoder.steps(prompt), bytes_of(prompt)
        return await self.encoding.run(steps, size, due_at, part, tenant)

    async def _prefix_hashes(self, task: Task, encoder: PromptEncoder) -> Sequence[bytes]:
        ids, salt, images = task.token_ids, task.cache_salt, task.images
        if len(ids) <= INLINE_HASH_TOKENS:
            return encoder.prefix_hashes(ids, salt, images)
        steps, size = encoder.hashes_in_steps(ids, salt, images), 8 * len(ids)
        return await self.encoding.run(steps, size, *_due(task), task.job.tenant)


def _due(task: Task) -> tuple[float, Part | str]:
    """When a reading of ``task`` becomes useless, and the part of its deadline that decides it."""
    due_at = min(task.deadline.at, task.parts.cut_at)
    return due_at, Part.FIRST_TOKEN if due_at < task.deadline.at else ""
