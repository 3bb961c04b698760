"""Engines say what they lack; tasks that need it go elsewhere, wait, or are told so (OR-7)."""

from typing import Any

import pytest

from orchestrator.instances.candidate import Candidate, read_capability
from orchestrator.placement.requirements import Requirements, features_of
from orchestrator.tasks.job import PlacementConstraint
from protocol import Feature, Grammar, GrammarKind, Sampling
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import Plan
from tests.support.jobs import make_job

ALL = tuple(sorted(Feature))
TASK = {"prompt": "hello", "max_tokens": 2}


def needs(job_changes: dict[str, Any] | None = None, **sampling: Any) -> set[Feature]:
    asked = Sampling(max_tokens=4, **sampling)
    return set(features_of(make_job(sampling=asked, **(job_changes or {})), asked))


@pytest.mark.parametrize(
    ("sampling", "feature"),
    [
        ({"ignore_eos": True}, Feature.IGNORE_EOS),
        ({"logit_bias": ((3, 1.0),)}, Feature.LOGIT_BIAS),
        ({"logprobs": 0}, Feature.LOGPROBS),
        ({"min_p": 0.1}, Feature.MIN_P),
        ({"min_tokens": 1}, Feature.MIN_TOKENS),
        ({"presence_penalty": 0.5}, Feature.PENALTIES),
        ({"frequency_penalty": -0.5}, Feature.PENALTIES),
        ({"repetition_penalty": 1.1}, Feature.PENALTIES),
        ({"prompt_logprobs": 0}, Feature.PROMPT_LOGPROBS),
        ({"seed": 0}, Feature.SEED),
        ({"skip_special_tokens": False}, Feature.SPECIAL_TEXT),
        ({"stop_token_ids": (5,)}, Feature.STOP_TOKEN_IDS),
    ],
)
def test_each_parameter_needs_its_feature_and_no_other(
    sampling: dict[str, Any], feature: Feature
) -> None:
    assert needs(**sampling) == {feature}


def test_what_is_neutral_needs_nothing() -> None:
    assert needs(temperature=0.3, top_p=0.5, top_k=3, stop=("x",)) == set()
    assert needs(temperature=0.0, seed=7) == set(), "greedy draws nothing"
    assert needs({"session_id": "s", "idle_keep_s": 9.0}) == set(), "what is kept spares work only"


def test_a_job_needs_what_it_says_in_addition_to_its_sampling() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a+")
    constraint = PlacementConstraint(capabilities=frozenset({Feature.STEP_ABORT}))
    assert needs({"grammar": grammar}) == {Feature.GRAMMAR}
    assert needs({"needs_ids": True}) == needs({"durable": True}) == {Feature.TOKEN_IDS}
    assert needs({"placement": constraint}) == {Feature.STEP_ABORT}


@for_each(
    ("asked", "has", "fits"),
    [
        ({"quantization": ("int8",)}, {"quantization": "int8"}, True),
        ({"quantization": ("int8", "awq")}, {"quantization": "none"}, False),
        ({"quantization": ("int8",)}, {}, False),
        ({"vram_bytes": 2**30}, {"vram_bytes": 2**30}, True),
        ({"vram_bytes": 2**30}, {"vram_bytes": 2**29}, False),
        ({"compute_capability": (8, 9)}, {"compute_capability": (10, 0)}, True),
        ({"compute_capability": (9, 0)}, {"compute_capability": (8, 9)}, False),
        ({"compute_capability": (9, 0)}, {}, False),
    ],
)
def test_or7_the_prefilter_holds_an_instance_against_what_is_asked_of_it(
    asked: dict[str, Any], has: dict[str, Any], fits: bool
) -> None:
    candidate = Candidate("a", "m", b"v", True, 1, 0, **has)
    requirements = Requirements("m", b"v", 0, constraint=PlacementConstraint(**asked))
    assert requirements.allows(candidate) is fits


def test_a_version_is_compared_by_its_numbers() -> None:
    assert read_capability("10.0") > read_capability("9.0") > read_capability("8.9")
    assert read_capability("") == read_capability("sm_90") == read_capability("9") == (0, 0)


async def offer(service: Service, **more: object) -> tuple[int, dict[str, Any]]:
    return await service.answer("POST", "/v2/tasks", json=TASK | more)


async def test_what_no_engine_of_the_model_can_do_is_refused_by_name(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker(lacks=(Feature.LOGIT_BIAS, Feature.SEED))
    service = await make_service(worker)
    status, body = await offer(service, logit_bias={"7": 1.0}, seed=3)
    assert status == 400
    assert "logit_bias and seed" in body["error"]["message"]
    assert "'fake'" in body["error"]["message"]
    assert body["error"]["field"] == "logit_bias"
    status, body = await offer(service, placement={"capabilities": ["seed"]})
    assert (status, body["error"]["field"]) == (400, "placement.capabilities")
    assert not worker.submits
    assert (await offer(service, seed=3, temperature=0))[0] == 202, "greedy needs no seed"
    await service.until(lambda: len(service.outcomes()) == 3)


async def test_a_task_goes_to_the_engine_that_can_and_waits_for_it(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    plain, able = await make_worker(lacks=ALL), await make_worker()
    service = await make_service(plain, able)
    registry = service.orchestrator.registry
    for _ in range(4):
        assert (await offer(service, min_tokens=1))[0] == 202
    await service.until(lambda: len(service.outcomes()) == 4)
    assert (len(plain.submits), len(able.submits)) == (0, 4)

    await able.stop()
    await service.until(lambda: not registry.instances[able.address].ready)
    assert (await offer(service, min_tokens=1))[0] == 202, "it may come back in time"
    assert (await offer(service))[0] == 202, "others need not wait"
    await service.until(lambda: len(service.outcomes()) == 5)
    await able.start()
    await service.until(lambda: len(service.outcomes()) == 6)
    assert set(service.outcomes()) == {"met"}
    assert len(able.submits) == 5


async def test_nothing_is_started_that_could_not_be_stopped_in_time(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    slow, quick = await make_worker(abort_ms=60_000.0), await make_worker()
    service = await make_service(slow, quick)
    for _ in range(4):
        assert (await offer(service, deadline_ms=30_000))[0] == 202
    await service.until(lambda: len(service.outcomes()) == 4)
    assert (len(slow.submits), len(quick.submits)) == (0, 4)


async def test_the_floor_is_what_an_abort_takes_where_every_engine_is_slow_at_it(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker(abort_ms=60_000.0)
    service = await make_service(worker)
    assert service.orchestrator.registry.capacity("fake").min_start_ms == 60_000
    status, body = await offer(service, deadline_ms=30_000)
    assert (status, body["error"]["code"]) == (504, "deadline_infeasible")
    assert not worker.submits


async def test_a_text_goes_on_only_where_its_ids_can_be_sent(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    first, second = await make_worker(), await make_worker(lacks=(Feature.TOKEN_IDS,))
    first.plan = lambda submit: Plan(die_at=2)
    service = await make_service(first, second)
    pin = {"mode": "prefer", "instances": [first.address]}
    assert (await offer(service, max_tokens=9, temperature=0, placement=pin))[0] == 202
    await service.until(lambda: len(service.outcomes()) == 1)
    assert not second.submits
