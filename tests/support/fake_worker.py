"""A worker that can be made to fail on demand: our lane protocol on a real gRPC socket, no Triton.

What a job does is its ``Plan``; by default it makes ``max_tokens`` tokens at once. Everything
that arrived is kept, so that a test can say what did not.
"""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import grpc
import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tritonclient.grpc import service_pb2_grpc

from orchestrator.lanes.lane import NO_JOB
from protocol import (
    PROTOCOL_VERSION,
    Cancel,
    Code,
    Delta,
    Describe,
    Drain,
    End,
    FinishReason,
    Frame,
    KvReport,
    LaneError,
    Loadable,
    ModelCard,
    OnDeadline,
    Open,
    Pause,
    PromptLogprobs,
    Resume,
    Started,
    Submit,
    Swap,
    SwapPhase,
    SwapReport,
    TokenLogprob,
    Vision,
    WorkerStats,
    decode_message,
    encode,
)
from protocol.tensors import FRAME, LANE_MESSAGE, MODEL_NAME
from tests.support.certificates import listen
from tests.support.clock import LeapingClock
from tests.support.fake_slots import FakeClips, failure, response
from tests.support.pictures import IMAGE_TEMPLATE

MODEL = "fake"
IMAGE_ID = 264
"""The token of an image, in a model that has ``eyes``."""
SLOT_MODEL = "slot"
EMPTY_FINAL = "triton_enable_empty_final_response"
CONTEXT = 512
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def tokenizer_json() -> bytes:
    """A tokenizer with a token per byte, so that a prompt has as many tokens as bytes."""
    specials = ["<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return tokenizer.to_str().encode()


def make_card(**changes: object) -> ModelCard:
    values: dict[str, object] = {
        "model": MODEL,
        "context_tokens": CONTEXT,
        "vocab_size": 262,
        "tokenizer_json": tokenizer_json(),
        "chat_template": TEMPLATE,
        "special_tokens": {"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
        "bos_token_id": 0,
        "eos_token_ids": (1,),
        "block_tokens": 16,
        "hash_salt": b"",
        "engine": "fake",
        "engine_version": "0",
        "engine_digest": "",
        "model_digest": "",
        "device": "cpu",
        "max_running": 64,
        "max_waiting": 64,
        "min_start_budget_ms": 0.0,
    }
    return ModelCard(**(values | changes))  # type: ignore[arg-type]


def eyes(**changes: object) -> dict[str, object]:
    """Changes to a card, so that its model reads images: a token for 8 by 8 pixels, 4 to 40."""
    tokenizer = Tokenizer.from_buffer(tokenizer_json())
    tokenizer.add_special_tokens(["<|see|>", "<|seen|>", "<|image|>"])
    pixels = {"cell": 8, "least_pixels": 256, "most_pixels": 2560}
    return {
        "tokenizer_json": tokenizer.to_str().encode(),
        "chat_template": IMAGE_TEMPLATE,
        "vocab_size": IMAGE_ID + 1,
        "vision": Vision("<|image|>", IMAGE_ID, max_bytes=100_000, **pixels),
    } | changes


@dataclass
class Plan:
    """What one job does. Counts are tokens, times seconds."""

    tokens: int | None = None
    """How many it makes; ``max_tokens`` when None."""
    per_delta: int = 1
    step_s: float = 0.0
    stall_at: int | None = None
    """Makes this many, then nothing until ``release`` is set."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    die_at: int | None = None
    """Breaks the whole stream after this many."""
    refuse: tuple[Code, str] | None = None
    """Ends at once with this."""
    fail_at: int | None = None
    """Ends with an engine error after this many."""
    ignores_deadline: bool = False
    ignores_cancel: bool = False
    in_band_error: str = ""
    """Answers the submission itself with an error."""
    reason: FinishReason = FinishReason.LENGTH
    tail: str = ""
    stop: str = ""
    """The stop string that it says ended the text."""
    text: Callable[[int], str] = lambda index: f"w{index} "
    speak: Callable[[int], tuple[int, str]] | None = None
    """Id and text of the token at a position of the whole text, prompt included, as a model has
    it; overrides ``text``."""
    top: Sequence[tuple[int, float]] | None = None
    """The likeliest tokens everywhere, with their log-probabilities; else the one that is made."""
    logprob: float = -0.5
    """Of each token that it makes."""
    stop_token_id: int | None = None
    begin: asyncio.Event | None = None
    """Starts once it is set."""
    cached: int = 0
    """Tokens of the prompt that its prefix cache held."""


def saying_goodbye(*, after_ms: int, grace_ms: int) -> list[tuple[str, int]]:
    """Options of a server that ends connections of that age (GOAWAY), and cuts them later."""
    return [
        ("grpc.max_connection_age_ms", after_ms),
        ("grpc.max_connection_age_grace_ms", grace_ms),
    ]


class FakeWorker:
    """A server on a port of its own. ``plan`` decides what each submitted job does."""

    def __init__(self, card: ModelCard | None = None, *, port: int = 0) -> None:
        self.card = card or make_card()
        self.process_id = uuid.uuid4().hex
        self.plan: Callable[[Submit], Plan] = lambda submit: Plan()
        self.slots: FakeClips | None = None
        """Its slot model; None: it has none."""
        self.is_slots_only = False
        """It has no text model."""
        self.version = PROTOCOL_VERSION
        self.port = port
        self.heartbeat_s = 0.05
        self.silent = False
        self.opens: list[Open] = []
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.probes = 0
        self.pauses: list[Pause] = []
        self.resumes: list[Resume] = []
        self.lanes: list[_FakeLane] = []
        self.foreign = 0
        self.cached: list[bytes] | None = None
        """Names of the blocks that it holds; None: it reports none."""
        self.describes = 0
        self.generation = 0
        """How often the model was loaded again: older lanes live on, and get nothing through."""
        self.is_unloaded = False
        """Triton refuses whatever is sent; lanes live on."""
        self.step_ms: float | None = None
        """Tells a step of so long for every token; None: it does not count its steps."""
        self.kv_blocks = 100
        self.tokens_total = 0
        self.jobs_total = 0
        self.drain_left_ms: float | None = None
        self.stuck_ms = 0.0
        self.models: dict[str, ModelCard] = {}
        """What it can be told to serve, by name."""
        self.swaps: list[Swap] = []
        self.swapping: asyncio.Task[None] | None = None
        self.swap_s = 0.0
        """What a load takes."""
        self.swap_error = ""
        """Why its swaps fail, once what ran has ended."""
        self.changed = asyncio.Condition()
        self.credentials: grpc.ServerCredentials | None = None
        """Of TLS; None: it speaks in plain text."""
        self.options: list[tuple[str, int]] = [("grpc.so_reuseport", 0)]
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def own_card(self) -> ModelCard:
        """The card as lanes send it."""
        return msgspec.structs.replace(self.card, process_id=self.process_id)

    @property
    def running(self) -> int:
        return sum(len(lane.jobs) for lane in self.lanes)

    @property
    def serves_texts(self) -> bool:
        return self._server is not None and not self.is_slots_only

    async def start(self) -> None:
        self.clock = LeapingClock(asyncio.get_running_loop())  # by it its jobs' budgets pass
        server = grpc.aio.server(options=self.options)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(self), server)
        self.port = listen(server, self.address, self.credentials)
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """As a crash, or a cut network: every stream breaks at once. Started again it is the
        process that it was."""
        if self.swapping is not None:
            self.swapping.cancel()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    def does(self, plan: Plan) -> Plan:
        """Every job does the same from now on, until its ``release`` is set where it stalls."""
        self.plan = lambda submit: plan
        return plan

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for something to have arrived or ended here."""
        async with self.changed:
            await self.changed.wait_for(done)

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def drain(self, left_ms: float | None = None) -> None:
        """Announce a drain on every lane; jobs still have ``left_ms``."""
        self.drain_left_ms = left_ms
        for lane in self.lanes:
            lane.draining = True
            await lane.send(stats=self.stats())

    def can_load(self, *names: str, load_ms: float = 0.0, size: int = 0) -> None:
        """Have it know further models, which are like its own but for their names."""
        known = (self.card.model, *names)
        loadable = tuple(Loadable(name, size, load_ms) for name in known)
        self.models = {
            name: msgspec.structs.replace(
                self.card, model=name, model_digest=name, loadable=loadable
            )
            for name in known
        }
        self.card = self.models[self.card.model]

    async def swap(self, message: Swap, answer: "_FakeLane", request_id: str) -> None:
        self.swaps.append(message)
        name = message.settings.get("model_name", "")
        was = self.card.model
        version = message.settings.get("model_path", "").rpartition("/")[2] or name
        if version not in self.models:
            await answer.refuse(request_id, f"invalid_request: knows no model {name!r}")
            return
        if self.models[version].model_digest == self.card.model_digest and not message.anew:
            await answer.send(swap=SwapReport(SwapPhase.DONE, name, was))
            return
        for lane in self.lanes:
            lane.draining = True
            drains = SwapReport(SwapPhase.DRAIN, name, was)
            await lane.send(swap=drains, stats=self.stats())
        await self.until(lambda: self.running == 0)
        await asyncio.sleep(self.swap_s)
        ms = {"drain": 1.0, "load": 1000 * self.swap_s}
        if self.swap_error:
            end = SwapReport(SwapPhase.FAILED, name, was, ms, self.swap_error)
        else:
            end = SwapReport(SwapPhase.DONE, name, was, ms)
        serving = self.card.serving + 1
        self.tokens_total = 0
        card = self.models[was if self.swap_error else version]
        self.card = msgspec.structs.replace(card, serving=serving)
        for lane in self.lanes:
            lane.draining = False
            await lane.send(swap=end, card=self.own_card, stats=self.stats(), cache=self.cache())
        await answer.send(swap=end)

    async def hand_back(self) -> None:
        """End all jobs as a draining worker does those that have not started."""
        for lane in self.lanes:
            for handle, job in list(lane.jobs.items()):
                del lane.jobs[handle]
                job.cancel()
                await lane.send(ends=[lane.drained(handle)], stats=self.stats())

    def cache(self) -> KvReport | None:
        return None if self.cached is None else KvReport(self.cached, [], full=True)

    def stats(self) -> WorkerStats:
        used = self.running
        steps = 0 if self.step_ms is None else self.tokens_total
        return WorkerStats(
            kv_blocks_total=self.kv_blocks,
            kv_blocks_used=used,
            kv_blocks_free=self.kv_blocks - used,
            running=used + self.foreign - sum(lane.paused for lane in self.lanes),
            waiting=0,
            step_ms=1.0,
            tokens_total=self.tokens_total,
            late_tokens_total=0,
            jobs_total=self.jobs_total,
            check_us=0.5,
            lanes=len(self.lanes),
            steps_total=steps,
            busy_ms_total=steps * (self.step_ms or 0.0),
            paused=sum(lane.paused for lane in self.lanes),
            load_ms=1234.5,
            drain_left_ms=self.drain_left_ms,
            stuck_ms=self.stuck_ms,
        )


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def ModelStreamInfer(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        lane = _FakeLane(self._worker, context)
        try:
            await lane.serve()
        finally:
            await lane.close()


class _FakeLane:
    """One open lane and its jobs, each a task."""

    def __init__(self, worker: FakeWorker, context: grpc.aio.ServicerContext) -> None:
        self.worker = worker
        self.name = ""
        self.generation = worker.generation
        self.draining = False
        self.silent = False
        self.jobs: dict[int, asyncio.Task[None]] = {}
        self._cancelled: dict[int, asyncio.Event] = {}
        self._may_go_on: dict[int, asyncio.Event] = {}
        self._context = context
        self._seq = itertools.count()
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._slots: set[asyncio.Task[None]] = set()
        self._heartbeat: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    @property
    def paused(self) -> int:
        """Jobs that stand still."""
        return sum(not self._may_go_on[handle].is_set() for handle in self.jobs)

    def drained(self, handle: int) -> End:
        code, reason = Code.DRAINING, FinishReason.CANCELLED
        return End(handle, reason, 5, 0, 0.0, 0.0, 0.0, 0.0, code, "the worker is shutting down")

    async def serve(self) -> None:
        reader = asyncio.create_task(self._read())
        closed = asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait([reader, closed], return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
        finally:
            for task in (reader, closed):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def close(self) -> None:
        tasks = [*self.jobs.values(), *self._slots, *([self._heartbeat] if self._heartbeat else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.jobs.clear()
        if self in self.worker.lanes:
            self.worker.lanes.remove(self)
        await self.worker.tell()

    async def send(self, **parts: object) -> None:
        """Write a frame; one that has begun is written to its end, even if its job is cancelled."""
        if self.worker.silent or self.silent:
            return
        write = asyncio.create_task(self._write(parts))
        self._writes.add(write)
        write.add_done_callback(self._written)
        await asyncio.shield(write)

    def _written(self, write: asyncio.Task[None]) -> None:
        self._writes.discard(write)
        if not write.cancelled():
            write.exception()  # a sender that was cancelled does not ask

    async def _write(self, parts: dict[str, object]) -> None:
        async with self._writing:
            frame = Frame(next(self._seq), draining=self.draining, **parts)  # type: ignore[arg-type]
            await self._context.write(response(MODEL_NAME, {FRAME: encode(frame)}))

    def skip_a_frame(self) -> None:
        """As if one had been lost on the way."""
        next(self._seq)

    async def _read(self) -> None:
        while True:
            request = await self._context.read()
            if request is grpc.aio.EOF:
                return
            others = set(request.parameters) - {EMPTY_FINAL}
            if any(name.startswith("triton_") for name in others):  # as Triton from 26.05 on
                await self.refuse(request.id, "keys starting with 'triton_' are reserved")
                continue
            if request.model_name == SLOT_MODEL:
                await self._slot(request)
                continue
            if self.worker.is_slots_only:
                await self.refuse(request.id, f"Request for unknown model: '{MODEL_NAME}'")
                continue
            names = [tensor.name for tensor in request.inputs]
            raw = request.raw_input_contents[names.index(LANE_MESSAGE)]
            message = decode_message(raw[4:])
            await self._apply(message, request.id)
            await self.worker.tell()

    async def _slot(self, request: object) -> None:
        """A request to the slot model, answered in a task of its own."""
        slots = self.worker.slots
        if slots is None:
            await self.refuse("", "Request for unknown model: 'slot' is not found")
            return
        serving = asyncio.create_task(slots.serve(request, self._answer, self._closed.set))
        self._slots.add(serving)
        serving.add_done_callback(self._slots.discard)

    async def _answer(self, response: object) -> None:
        async with self._writing:
            await self._context.write(response)

    async def refuse(self, request_id: str, message: str) -> None:
        """An error in-band, as Triton has it."""
        await self._answer(failure(message, request_id))

    async def _apply(self, message: object, request_id: str) -> None:
        worker = self.worker
        if worker.is_unloaded:
            unknown = "Request for unknown model: 'llm' has no available versions"
            await self.refuse(request_id, unknown)
            return
        if self.generation != worker.generation:
            await self.refuse(request_id, f"lane_closed: lane '{self.name}' is not open here")
            return
        match message:
            case Open():
                worker.opens.append(message)
                if message.version != worker.version:
                    await self.send(error=LaneError(Code.PROTOCOL_VERSION, "wrong version"))
                    self._closed.set()
                    return
                self.name = message.lane
                worker.lanes.append(self)
                await self.send(card=worker.own_card, stats=worker.stats(), cache=worker.cache())
                self._heartbeat = asyncio.create_task(self._beat())
            case Submit():
                worker.submits.append(message)
                worker.jobs_total += 1
                plan = worker.plan(message)
                if plan.in_band_error:
                    await self.refuse(request_id, plan.in_band_error)
                    return
                self._cancelled[message.handle] = asyncio.Event()
                self._may_go_on[message.handle] = asyncio.Event()
                self._may_go_on[message.handle].set()
                self.jobs[message.handle] = asyncio.create_task(self._run(message, plan))
            case Cancel(handles=[handle]) if handle == NO_JOB:
                worker.probes += 1
            case Cancel():
                worker.cancels.append(message)
                for handle in message.handles:
                    if handle in self._cancelled:
                        self._cancelled[handle].set()
            case Pause():
                worker.pauses.append(message)
                going = self._may_go_on.get(message.handle)
                if message.handle in self.jobs and going is not None and going.is_set():
                    going.clear()
                    await self.send(paused=[message.handle])
            case Resume():
                worker.resumes.append(message)
                going = self._may_go_on.get(message.handle)
                if message.handle in self.jobs and going is not None and not going.is_set():
                    await self.send(resumed=[message.handle])
                    going.set()
            case Describe():
                worker.describes += 1
                await self.send(card=worker.own_card, cache=worker.cache())
            case Drain():
                await worker.drain()
            case Swap():
                # On its own: the asker may leave.
                worker.swapping = asyncio.create_task(worker.swap(message, self, request_id))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.worker.heartbeat_s)
            await self.send(stats=self.worker.stats())

    async def _run(self, job: Submit, plan: Plan) -> None:
        produce = asyncio.create_task(self._produce(job, plan))
        watch = asyncio.create_task(self._cancelled[job.handle].wait())
        clock, overdue = self.worker.clock, asyncio.get_running_loop().create_future()
        due_at = clock.now() + max(0.0, job.budget_ms / 1000)
        timer = clock.call_at(due_at, lambda: overdue.set_result(None))
        ends: set[asyncio.Future[object]] = {produce}
        if not plan.ignores_cancel:
            ends.add(watch)
        if not plan.ignores_deadline:
            ends.add(overdue)
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if produce in done:
                made, reason, code, text = produce.result()
            elif watch in done:
                made, reason, code, text = -1, FinishReason.CANCELLED, Code.CANCELLED, "cancelled"
            else:
                partial = job.on_deadline is OnDeadline.PARTIAL
                made, reason, text = -1, FinishReason.DEADLINE, "" if partial else "too late"
                code = None if partial else Code.DEADLINE_EXCEEDED
        finally:
            timer.cancel()
            for task in (produce, watch):
                task.cancel()
            await asyncio.gather(produce, watch, return_exceptions=True)
        self.jobs.pop(job.handle, None)
        end = End(
            handle=job.handle,
            reason=reason,
            prompt_tokens=len(job.token_ids),
            completion_tokens=max(0, made),
            wait_ms=0.0,
            prefill_ms=0.1,
            decode_ms=0.2,
            left_ms=0.0,
            code=code,
            message=text,
            abort_ms=0.05 if reason in (FinishReason.CANCELLED, FinishReason.DEADLINE) else None,
            tail=plan.tail,
            cached_tokens=plan.cached,
            stop=plan.stop,
            stop_token_id=plan.stop_token_id,
        )
        await self.send(ends=[end], stats=self.worker.stats())
        await self.worker.tell()

    async def _produce(self, job: Submit, plan: Plan) -> tuple[int, FinishReason, Code | None, str]:
        if plan.refuse is not None:
            return 0, FinishReason.ERROR, *plan.refuse
        if plan.begin is not None:
            await plan.begin.wait()
        await self.send(started=[Started(job.handle, 0.0)])
        if (top := job.sampling.prompt_logprobs) is not None:
            await self._read_prompt(job, top)
        total = job.sampling.max_tokens if plan.tokens is None else plan.tokens
        made = 0
        while made < total:
            if made == plan.stall_at:
                await plan.release.wait()
            if made == plan.die_at:
                self._closed.set()
                await asyncio.Event().wait()
            if made == plan.fail_at:
                return made, FinishReason.ERROR, Code.ENGINE_ERROR, "the engine failed"
            if plan.step_s:
                await asyncio.sleep(plan.step_s)
            await self._may_go_on[job.handle].wait()
            count = min(plan.per_delta, total - made)
            told = {} if made else {"cached": [(job.handle, plan.cached)]}
            await self.send(deltas=[self._delta(job, plan, range(made, made + count))], **told)
            made += count
            self.worker.tokens_total += count
        return made, plan.reason, None, ""

    async def _read_prompt(self, job: Submit, top: int) -> None:
        """In two pieces: each token is as likely as its place in the prompt says."""
        entries = [
            TokenLogprob(-float(at), [(one, -0.25) for one in range(10, 10 + top)], rank=at + 1)
            for at in range(len(job.token_ids))
        ]
        middle = 1 + len(entries) // 2
        for first, end in ((1, middle), (middle, len(entries))):
            if first < end:
                piece = PromptLogprobs.pack(first, entries[first:end])
                await self.send(prompts=[(job.handle, piece)])

    def _delta(self, job: Submit, plan: Plan, indices: Sequence[int]) -> Delta:
        spoken = [(i % 200, plan.text(i)) for i in indices]
        if plan.speak is not None:
            spoken = [plan.speak(len(job.token_ids) + i) for i in indices]
        top = job.sampling.logprobs
        logprobs = None
        if top is not None:
            likeliest = [plan.top or [(id, -0.5)] * top for id, _ in spoken]
            logprobs = [TokenLogprob(plan.logprob, list(pairs[:top])) for pairs in likeliest]
        return Delta(job.handle, [id for id, _ in spoken], [text for _, text in spoken], logprobs)
