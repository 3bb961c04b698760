"""The real orchestrator in front of real workers, all on virtual time."""

import random
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from orchestrator.build import Components, build
from orchestrator.clock import Clock
from orchestrator.lanes import LaneConfig, LaneOwner
from orchestrator.prompts.encoder import PromptEncoder
from orchestrator.settings import Settings
from perf.sim.replay.lane import SimLane
from perf.sim.replay.loop import VirtualClock
from perf.sim.replay.worker import SimWorker, WorkerSpec
from protocol import Feature, ModelCard

VOCABULARY = 2**20
"""Number of token ids; an answer's length is one of them (``worker``)."""
_TOKENIZER = (
    b'{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"},'
    b'"decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false}}'
)


@dataclass(frozen=True, slots=True)
class VirtualInstance:
    """One instance: how it works, and what its worker says of itself."""

    spec: WorkerSpec
    card: ModelCard


@dataclass(frozen=True, slots=True)
class VirtualService:
    """An orchestrator that has not started yet, and the workers that it is in front of."""

    parts: Components
    workers: dict[str, SimWorker]
    """Workers by their address."""


def new_service(
    machines: Mapping[str, VirtualInstance],
    clock: VirtualClock,
    settings: Settings,
    rng: random.Random,
) -> VirtualService:
    """An orchestrator in front of new workers, ``machines`` by address, which are the settings'
    instances."""
    workers = {
        address: SimWorker(one.spec, one.card, clock, random.Random(rng.random()))
        for address, one in machines.items()
    }

    def make_lane(
        address: str, config: LaneConfig, owner: LaneOwner, clock: Clock, rng: random.Random
    ) -> SimLane:
        return SimLane(workers[address], address, config, owner, clock, rng)

    parts = build(settings, clock, rng, make_lane=make_lane)
    parts.orchestrator.stages.reader.encoding.executor = _AtOnce()
    encoders: list[PromptEncoder] = []
    for instance in parts.orchestrator.registry:
        card = machines[instance.address].card
        known = next((one for one in encoders if one.card == card), None)
        if known is None:
            encoders.append(known := PromptEncoder(card))
        instance.encoder = known  # else it would be loaded in a thread
    return VirtualService(parts, workers)


class _AtOnce(Executor):
    """Does in place what threads do elsewhere: while they worked, virtual time would run away."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def virtual_card(
    model: str, spec: WorkerSpec, context_tokens: int, block_tokens: int = 16
) -> ModelCard:
    """The card of a virtual worker."""
    return ModelCard(
        model=model,
        context_tokens=context_tokens,
        vocab_size=VOCABULARY,
        tokenizer_json=_TOKENIZER,
        chat_template="",
        special_tokens={},
        bos_token_id=None,
        eos_token_ids=(),
        block_tokens=block_tokens,
        hash_salt=b"",
        engine="sim",
        engine_version="1",
        engine_digest="",
        model_digest="",
        device="none",
        max_running=spec.slots,
        max_waiting=spec.slots * 8,
        min_start_budget_ms=1000 * spec.min_start_s,
        max_step_tokens=spec.step_tokens,
        can_pause=True,
        can_continue=True,
        step_costs=spec.cost.steps_of(spec.slots),
        lacks=(Feature.FINISH,),  # as its worker says: another card would be read in a thread
    )
