"""A ``Backend`` over ``transformers``: prompts in chunks, a token for all texts a step."""

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from secrets import randbits
from threading import Event

import numpy as np
import torch
from torch import Tensor

from protocol import Code, FinishReason
from protocol.outcomes import RequestError
from worker.core import Job
from worker.engines.backend import BackendLoad, Produced, not_finite
from worker.engines.images import places_of
from worker.engines.transformers.batches import Texts
from worker.engines.transformers.decoder import Cache, LibraryDecoder
from worker.engines.transformers.images import ImageReader, Pixels
from worker.errors import InvalidCall
from worker.grammar.masks import MaskedRow, MaskMaker
from worker.log import engine_log
from worker.runner.device_probe import probe_of
from worker.sampling.sampler import NO_TOKEN, Sampler
from worker.scheduler.request import Request, make_request


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """Limits of the backend. ``pool_tokens``: tokens that all texts may hold, padding included."""

    max_running: int
    pool_tokens: int
    block_tokens: int
    chunk_tokens: int
    """Tokens of a prompt that a step reads at most; 0: prompts are read in one step."""


@dataclass(slots=True, eq=False)
class _Text:
    """A job with its progress. ``cache`` is its own until its prompt has been read."""

    handle: int
    request: Request
    cache: Cache
    images: Future[Pixels] | None = None
    """Images of the prompt, which a thread prepares; None once they were read, or without any."""
    images_end: int = 0
    """Number of tokens up to the last one of its images; they are read in one step."""
    shift: int = 0
    """What is added to its positions after its images."""

    @property
    def can_start(self) -> bool:
        return self.images is None or self.images.done()


class TransformersBackend:
    """A ``Backend``. Jobs given up are freed at once; ``step`` computes by itself."""

    def __init__(
        self,
        decoder: LibraryDecoder,
        texts: Texts,
        sampler: Sampler,
        limits: BackendLimits,
        images: ImageReader | None = None,
    ) -> None:
        """``images`` reads those of prompts; None for a model of text only."""
        self._decoder = decoder
        self._texts = texts
        self._sampler = sampler
        self._limits = limits
        self._probe = probe_of(decoder.device)
        self._images = images
        self._preparing = ThreadPoolExecutor(1, "tidegate-images")
        self._news = Event()
        """Set when images are ready, and by ``interrupt``."""
        self._masks = MaskMaker(sampler.vocab_size, sampler.eos_token_ids)
        self._free_slots = list(range(limits.max_running))
        self._queued: deque[_Text] = deque()
        """Texts that wait for memory or a slot."""
        self._reading: deque[_Text] = deque()
        self._jobs: dict[int, _Text] = {}
        """Texts by handle, all but those that are queued."""
        self._prompt_tokens = 0

    def add(self, handle: int, job: Job, max_tokens: int) -> None:
        """See ``Backend``."""
        request = make_request(job, submitted_at=0.0, own_seed=randbits(64))
        request.limit_tokens = request.prompt_tokens + max_tokens
        text = _Text(handle, request, None)
        if job.images:
            self._prepare(text, job)
        self._queued.append(text)

    def _prepare(self, text: _Text, job: Job) -> None:
        """Have a thread prepare a text's images. Raises ``InvalidCall``."""
        if self._images is None:
            raise InvalidCall("this worker's model reads no images")
        # What was generated elsewhere may have that token too, and shows nothing.
        own = len(job.token_ids) - job.begun_tokens
        places = places_of(self._images.vision, job.token_ids[:own])
        text.images_end = places[-1] + 1
        text.images = self._preparing.submit(self._images.read, job.images, len(places))
        text.images.add_done_callback(lambda done: self._news.set())

    def abort(self, handles: Collection[int]) -> None:
        """See ``Backend``."""
        gone = frozenset(handles)
        for text in self._queued:
            if text.handle in gone and text.images is not None:
                text.images.cancel()
        self._queued = deque(one for one in self._queued if one.handle not in gone)
        self._reading = deque(one for one in self._reading if one.handle not in gone)
        self._texts.leave(gone)
        for handle in gone & self._jobs.keys():
            text = self._jobs.pop(handle)
            text.cache = None
            self._free_slots.append(text.request.slot)

    def holds(self, handle: int) -> bool:
        """See ``Backend``."""
        return False

    @property
    def has_failed(self) -> bool:
        """See ``Backend``."""
        return False

    def step(self, wait_s: float) -> Sequence[Produced]:
        """Read a chunk of one prompt, and draw a token for each text whose prompt has been read."""
        self._await_images(wait_s)
        self._take_queued()
        handles, logits = self._decode()
        failed = [] if logits is not None or not handles else handles
        made = self._fail(failed) if failed else []
        rows = [] if failed else [self._jobs[handle] for handle in handles]
        parts = [] if logits is None else [logits]
        if self._reading:
            text = self._reading[0]
            try:
                read = self._read(text)
            except RequestError as error:
                self.abort([text.handle])
                end = FinishReason.ERROR
                made.append(Produced(text.handle, end=end, code=error.code, message=str(error)))
            except Exception:
                self._check_device()
                engine_log.exception("a prompt could not be read")
                made += self._fail([text.handle])
            else:
                if read is not None:
                    parts.append(read)
                    rows.append(text)
        if rows:
            made += self._draw(rows, torch.cat(parts))
        return made

    def interrupt(self) -> None:
        """See ``Backend``: ``step`` waits for nothing but images."""
        self._news.set()

    def load(self) -> BackendLoad:
        """See ``Backend``."""
        block = self._limits.block_tokens
        held = self._reserved(self._jobs.values())
        return BackendLoad(
            kv_blocks_total=self._limits.pool_tokens // block,
            kv_blocks_used=min(-(-held // block), self._limits.pool_tokens // block),
            running=len(self._jobs),
            waiting=len(self._queued),
            prompt_tokens_total=self._prompt_tokens,
        )

    def close(self) -> None:
        """See ``Backend``."""
        self.abort([*self._jobs, *(one.handle for one in self._queued)])
        self._preparing.shutdown(wait=False, cancel_futures=True)
        self._masks.close()
        self._decoder.close()

    @staticmethod
    def _reserved(texts: Collection[_Text]) -> int:
        """Tokens that these texts can come to hold: in a batch each is as wide as the widest."""
        return len(texts) * max((one.request.limit_tokens for one in texts), default=0)

    def _await_images(self, wait_s: float) -> None:
        """Wait where there is nothing else to do than to prepare images."""
        if self._jobs or not self._queued or any(one.can_start for one in self._queued):
            return
        self._news.wait(wait_s)
        self._news.clear()

    def _take_queued(self) -> None:
        """Take up texts in their order, but for those whose images are not ready."""
        for text in [one for one in self._queued if one.can_start]:
            if not self._free_slots:
                return
            held = [*self._jobs.values(), text]
            if len(held) > 1 and self._reserved(held) > self._limits.pool_tokens:
                return
            self._queued.remove(text)
            text.request.slot = self._free_slots.pop()
            text.cache = self._decoder.new_cache()
            self._jobs[text.handle] = text
            self._reading.append(text)

    def _decode(self) -> tuple[list[int], Tensor | None]:
        """Decode a token of each text: handles and logits, None without texts or on error."""
        handles = list(self._texts.handles)
        if not handles:
            return handles, None
        latest = [self._jobs[one].request.tokens[-1] for one in handles]
        try:
            return handles, self._texts.step(latest)
        except Exception:
            self._check_device()
            engine_log.exception("a step failed; ending its %d jobs", len(handles))
            return handles, None

    def _check_device(self) -> None:
        """Raise ``DeviceLost``, from the error being handled, if the device itself has failed."""
        if self._probe is not None:
            self._probe.check()

    def _fail(self, handles: Sequence[int]) -> list[Produced]:
        self.abort(handles)
        message = "the engine failed at a step of this text; its log says why"
        return [
            Produced(one, end=FinishReason.ERROR, code=Code.ENGINE_ERROR, message=message)
            for one in handles
        ]

    def _read(self, text: _Text) -> Tensor | None:
        """Read the next chunk of a prompt; returns the logits after its last one, None before."""
        request = text.request
        if text.images is not None:
            return self._read_images(text, text.images.result())
        start = request.computed
        end = request.prompt_tokens
        if self._limits.chunk_tokens:
            end = min(end, start + self._limits.chunk_tokens)
        device = self._decoder.device
        ids = torch.tensor([request.tokens[start:end]], device=device)
        positions = torch.arange(start, end, device=device)[None] + text.shift
        logits, text.cache = self._decoder.run(ids, text.cache, positions)
        return self._has_read(text, end, logits)

    def _read_images(self, text: _Text, pixels: Pixels) -> Tensor | None:
        """Read a prompt up to its last image in one step: some models see an image's tokens all
        together or not at all."""
        assert self._images is not None
        end, text.images = text.images_end, None
        ids = torch.tensor([text.request.tokens[:end]], device=self._decoder.device)
        logits, text.cache, text.shift = self._decoder.run_images(
            ids, text.cache, pixels, self._images.vision.token_id
        )
        return self._has_read(text, end, logits)

    def _has_read(self, text: _Text, end: int, logits: Tensor) -> Tensor | None:
        """Account for a prompt that is read up to ``end``; returns ``logits`` if that is all."""
        request = text.request
        self._prompt_tokens += end - request.computed
        request.computed = end
        if end < request.prompt_tokens:
            return None
        self._reading.popleft()
        self._sampler.begin(request.slot, request)
        self._texts.join(text.handle, text.cache, end, text.shift)
        text.cache = None
        return logits

    def _draw(self, texts: Sequence[_Text], logits: Tensor) -> list[Produced]:
        requests = [one.request for one in texts]
        masked = [
            MaskedRow(
                row,
                one.job.constraint,
                one.tokens[one.prompt_tokens :],
                one.generated < one.job.sampling.min_tokens,
            )
            for row, one in enumerate(requests)
            if one.job.constraint is not None
        ]
        sampled = self._sampler.sample(
            logits[:, : self._sampler.vocab_size].contiguous(),
            np.array([one.slot for one in requests], np.int64),
            np.array([len(one.tokens) for one in requests], np.int64),
            torch.tensor([one.tokens[-1] for one in requests], device=self._decoder.device),
            lambda: self._masks.make(masked),
        )
        ids, logprobs = sampled.read()
        made = []
        for row, (text, token) in enumerate(zip(texts, ids, strict=True)):
            if token == NO_TOKEN:
                self.abort([text.handle])
                made.append(not_finite(text.handle))
                continue
            text.request.tokens.append(token)
            one = None if logprobs is None else logprobs[row]
            made.append(Produced(text.handle, [token], None if one is None else [one]))
        return made
