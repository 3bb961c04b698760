"""Jobs to vLLM's terms and back: what needs no vLLM."""

import math
import re
import sys
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from catalog.paths import DEMO_CHECKPOINT
from protocol import Adapter, Feature, KvReport, Sampling
from protocol.blocks import adapter_salt, block_hashes, prefix_salt
from protocol.sampling import MAX_LOGIT_BIASES
from tests.support.cases import for_each
from worker.core import Job
from worker.engines.vllm import arguments
from worker.engines.vllm.arguments import check_names, check_settings, command_line, defaults
from worker.engines.vllm.build import build_engine, gpu_share, lacking
from worker.engines.vllm.library import process_count
from worker.engines.vllm.prefix_cache import PrefixReports, block_hasher
from worker.engines.vllm.requests import (
    MAX_STOP_TOKENS,
    GrammarState,
    end_mask,
    sampling_values,
    token_logprobs,
)
from worker.environment import nested
from worker.errors import EngineMissing, InvalidCall
from worker.grammar.constraint import Constraint
from worker.memory import GIB
from worker.settings import WorkerSettings

EOS = (1, 5)
FLAGS = {
    "max_num_seqs": ["--max-num-seqs"],
    "enforce_eager": ["--enforce-eager", "--no-enforce-eager"],
}


def settings(**values: Any) -> WorkerSettings:
    stated = {"model_path": Path("/m"), "engine": "vllm", "device": "cpu"} | values
    return WorkerSettings(**nested(stated))


def values_of(**asked: Any) -> dict[str, Any]:
    job = Job((1, 2), Sampling(**({"max_tokens": 9} | asked)), math.inf)
    return sampling_values(job, 9, EOS)


def test_what_vllm_spells_otherwise() -> None:
    assert values_of(top_k=-1)["top_k"] == 0
    assert values_of()["seed"] is None
    assert values_of(logit_bias=((3, 1.5),))["logit_bias"] == {3: 1.5}
    assert values_of()["logit_bias"] is None


@for_each(
    ("asked", "given"),
    [(7, 7), (-2, -2), (2**64 - 2, -2), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (-1, -1)],
)
def test_every_seed_fits_vllms_arrays_of_int64(asked: int, given: int) -> None:
    seed = values_of(seed=asked)["seed"]
    assert seed == given
    np.zeros(1, np.int64)[0] = seed  # raises for what does not fit, as vLLM's sampler would


def test_more_tokens_than_vllm_can_bar_are_refused_by_name() -> None:
    def ids(count: int) -> tuple[int, ...]:
        return tuple(range(10, 10 + count))

    assert len(values_of(min_tokens=1, stop_token_ids=ids(126))["stop_token_ids"]) == 128
    assert len(values_of(stop_token_ids=ids(127))["stop_token_ids"]) == 129, "none is barred"
    with pytest.raises(InvalidCall, match=r"stop_token_ids: with min_tokens at most 126 .* 127"):
        values_of(min_tokens=1, stop_token_ids=ids(127))
    assert values_of(min_tokens=1, stop_token_ids=ids(128), ignore_eos=True)


def test_the_limits_are_those_of_the_vllm_that_is_installed() -> None:
    """Read, not imported: its GPU runner's files need its kernels."""
    try:
        found = find_spec("vllm")
    except ImportError:
        found = None
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    sampler = Path(found.origin).parent / "v1/worker/gpu/sample"
    limits = dict(re.findall(r"(MAX_\w+) = (\d+)", (sampler / "logit_bias.py").read_text("utf-8")))
    assert int(limits["MAX_NUM_STOP_TOKEN_IDS"]) == MAX_STOP_TOKENS
    assert int(limits["MAX_NUM_LOGIT_BIAS_TOKENS"]) >= MAX_LOGIT_BIASES
    seeds = re.search(r"self\.seeds = .*", (sampler / "states.py").read_text("utf-8"))
    assert seeds is not None and "torch.int64" in seeds.group()


def test_min_tokens_give_way_to_a_grammar() -> None:
    job = Job((1,), Sampling(max_tokens=9, min_tokens=4), math.inf)
    assert sampling_values(job, 9, EOS)["min_tokens"] == 4
    job.constraint = Constraint()
    assert sampling_values(job, 9, EOS)["min_tokens"] == 0


def test_logprobs_of_a_step_in_which_others_ask_for_more() -> None:
    @dataclass
    class Lists:
        logprob_token_ids: Any = field(default_factory=lambda: np.array([[4, 4, 8, 9]]))
        logprobs: Any = field(default_factory=lambda: np.array([[-0.5, -0.5, -1.0, -2.0]]))
        sampled_token_ranks: Any = field(default_factory=lambda: np.array([1]))

    (one,) = token_logprobs(Lists(), 2)
    assert (one.logprob, one.rank, one.top) == (-0.5, 1, [(4, -0.5), (8, -1.0)])
    assert token_logprobs(Lists(), 0)[0].top == []


@for_each(
    ("stated", "words"),
    [
        ({"max_num_seqs": "8"}, ["--max-num-seqs=8"]),
        ({"enforce_eager": "true"}, ["--enforce-eager"]),
        ({"enforce_eager": "false"}, ["--no-enforce-eager"]),
    ],
)
def test_engine_args_as_vllms_own_words(stated: dict[str, str], words: list[str]) -> None:
    check_names(stated, FLAGS)
    assert command_line(stated, FLAGS) == words


def test_unknown_and_reserved_engine_args_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no argument max_num_seq; did you mean max_num_seqs"):
        check_names({"max_num_seq": "8"}, FLAGS)
    with pytest.raises(ValueError, match="model is Tidegate's to set"):
        check_names({"model": "x"}, FLAGS)
    with pytest.raises(ValueError, match="set TIDEGATE_WORKER__TENSOR_PARALLEL"):
        check_names({"tensor_parallel_size": "2"}, {"tensor_parallel_size": []})


def test_settings_that_would_mean_nothing_are_refused() -> None:
    for name, value in {"deterministic": True, "kv__disk_path": "/kv"}.items():
        with pytest.raises(ValueError, match=f"TIDEGATE_WORKER__{name.upper()} is not for"):
            check_settings(settings(**{name: value}))
    check_settings(settings())
    check_settings(settings(device="cuda", deterministic=True))


@for_each(("tensor", "stages", "count"), [(1, None, 1), (2, None, 2), (2, "3", 6), (1, "many", 1)])
def test_vllm_has_a_process_for_each_gpu_of_each_stage(
    tensor: int, stages: str | None, count: int
) -> None:
    stated = {} if stages is None else {"pipeline_parallel_size": stages}
    assert process_count(settings(tensor_parallel=tensor, engine_args=stated)) == count


@for_each(
    ("free_gib", "hard_gib", "share"),
    [(80, 0, 0.9), (40, 0, 0.485), (80, 20, 0.25), (8, 20, 0.097)],
)
def test_a_gpu_is_taken_as_far_as_it_is_free_and_as_the_operator_says(
    free_gib: int, hard_gib: float, share: float
) -> None:
    assert gpu_share(0.9, 80 * GIB, free_gib * GIB, hard_gib) == pytest.approx(share)


def test_the_workers_limits_are_vllms_unless_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    found = defaults(settings(max_running=7, kv__blocks=40, dtype="float32"))
    assert found["max_num_seqs"] == "7"
    assert found["num_gpu_blocks_override"] == "40"
    assert found["dtype"] == "float32"
    assert "block_size" not in found  # its own is what its kernels like
    sizes = {"max_num_seqs", "max_num_batched_tokens"}
    assert sizes <= defaults(settings(device="cpu")).keys()
    assert not sizes & defaults(settings(device="cuda")).keys(), "its own follow the GPU"
    assert defaults(settings(device="cuda", max_step_tokens=999))["max_num_batched_tokens"] == "999"
    usage = SimpleNamespace(UsageContext=SimpleNamespace(OPENAI_API_SERVER="as vllm serve"))
    monkeypatch.setitem(sys.modules, "vllm.usage.usage_lib", usage)
    monkeypatch.setitem(sys.modules, "vllm.config.kv_events", SimpleNamespace(KVEventsConfig=dict))
    args = SimpleNamespace(create_engine_config=str)
    monkeypatch.setattr(arguments, "engine_args", lambda _: args)
    given = settings(model_path=DEMO_CHECKPOINT, device="cuda")
    assert arguments.engine_config(given) == "as vllm serve"


def test_a_card_lacks_what_speculation_takes_away() -> None:
    plain = lacking(grammars=True, kv_events=True, speculates=False)
    assert plain == (Feature.SESSIONS,)
    guessing = lacking(grammars=False, kv_events=False, speculates=True)
    assert {Feature.GRAMMAR, Feature.KV_EVENTS, Feature.LOGIT_BIAS, Feature.MIN_P} < set(guessing)


@dataclass
class Tokens:
    """What a vLLM request has for a hasher."""

    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@for_each("salt", ["", "tenant"])
def test_vllms_blocks_have_our_names_however_a_text_grows(salt: str) -> None:
    hasher = block_hasher(4, b"model")
    request = Tokens([], salt or None)
    for token in range(18):
        request.all_token_ids.append(token)
        request.block_hashes += hasher(request)
    assert request.block_hashes == block_hashes(range(18), 4, prefix_salt(b"model", salt))


def test_an_adapters_blocks_have_names_of_their_own() -> None:
    tone, law = Adapter("tone", "ab" * 32), Adapter("law", "cd" * 32)
    hasher = block_hasher(4, b"model", [tone, law])
    for adapter in (tone, law):
        request = Tokens([*range(9)], "tenant", SimpleNamespace(lora_name=adapter.name))
        salt = prefix_salt(adapter_salt(b"model", adapter.digest), "tenant")
        assert hasher(request) == block_hashes(range(9), 4, salt)
        assert hasher(request) != hasher(Tokens([*range(9)], "tenant"))


@for_each("prompt_tokens", [6, 8, 9])
def test_blocks_with_images_are_named_by_what_these_show(prompt_tokens: int) -> None:
    """Up to the prompt's end, which is amid a block or not; the answer's tokens follow."""
    keyed = [1000 + at for at in range(prompt_tokens)]
    request, answer = Tokens([7] * prompt_tokens), range(12)
    hasher = partial(block_hasher(4, b"model"), keyed=keyed)
    request.block_hashes += hasher(request)
    for token in answer:
        request.all_token_ids.append(token)
        request.block_hashes += hasher(request)
    assert request.block_hashes == block_hashes([*keyed, *answer], 4, b"model")


@dataclass
class Event:
    block_hashes: list[bytes]


@dataclass
class Batch:
    events: list[Any]


def test_prefix_reports_say_what_the_cache_holds_not_what_events_say() -> None:
    cache = {b"a", b"b"}
    reports = PrefixReports(lambda name: name in cache)
    reports.publish(Batch([Event([b"a"]), Event([b"b"]), Event([b"gone"])]))
    assert reports.take() == KvReport([b"a", b"b"], [])
    reports.publish(Batch([Event([b"a"])]))  # one of two copies went: it is still there
    cache.remove(b"b")
    reports.publish(Batch([Event([b"b"])]))
    assert reports.take() == KvReport([], [b"b"])
    cache.clear()
    reports.publish(Batch([object()]))  # all cleared
    assert reports.take() == KvReport([], [b"a"])


def test_a_grammar_state_hands_on_what_was_generated_and_never_rejects() -> None:
    seen: list[list[int]] = []

    class Watched(Constraint):
        def advance(self, generated: Any) -> None:
            seen.append(list(generated))

    state = GrammarState(Watched(), end_mask(64, EOS))
    assert state.accept_tokens("1", [3]) and state.accept_tokens("1", [4, 5])
    state.rollback(2)
    assert seen == [[3], [3, 4, 5], [3]]
    assert not state.is_terminated()


def test_without_vllm_the_command_that_installs_it_is_named() -> None:
    from importlib.util import find_spec

    if find_spec("vllm") is not None:
        pytest.skip("vllm is installed here")
    with pytest.raises(EngineMissing, match="tidegate engines ensure vllm --device cpu"):
        build_engine(settings(engine_args={}))
