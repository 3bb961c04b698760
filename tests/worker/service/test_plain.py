"""The plain contract, as Triton's vLLM backend has it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from protocol import (
    AbortCause,
    Code,
    FinishReason,
    InvalidSampling,
    OnDeadline,
    Sampling,
    SamplingDefaults,
    TokenLogprob,
)
from protocol import tensors as names
from tests.support.cases import for_each
from tests.support.fake_worker import tokenizer_json
from tests.support.triton_calls import FakeResponder, plain_call
from tests.worker.service.conftest import Harness
from worker.core import Job, JobTokens
from worker.errors import InvalidCall
from worker.grammar.compiler import build_compiler
from worker.service.call import Call, strings
from worker.service.plain_request import parse_plain


def ask(harness: Harness, text: str = "ab", **inputs: object) -> tuple[Job, FakeResponder]:
    responder = FakeResponder()
    known = len(harness.engine.submitted)
    harness.service.accept(plain_call(text, responder, **inputs))
    return harness.engine.wait_submitted(known + 1)[known], responder


def refused(harness: Harness, text: str = "ab", **inputs: object) -> tuple[Code, str]:
    """Why a request is refused, which never reaches the engine."""
    responder, known = FakeResponder(), len(harness.engine.submitted)
    harness.service.accept(plain_call(text, responder, **inputs))
    refusal = responder.refusal()
    assert len(harness.engine.submitted) == known
    return refusal


def texts(responder: FakeResponder) -> list[str]:
    return [tensors[names.TEXT_OUTPUT][0].decode() for tensors in responder.sent]


@pytest.mark.parametrize(
    ("inputs", "text"), [({}, "abcdef"), ({"exclude_input_in_output": True}, "cdef")]
)
def test_without_streaming_one_response_repeats_the_prompt_unless_told_otherwise(
    harness: Harness, inputs: dict[str, object], text: str
) -> None:
    job, responder = ask(harness, "ab", **inputs)
    harness.speak(job, "cd")
    harness.speak(job, "ef")
    harness.finish(job)
    responder.wait_final()
    assert texts(responder) == [text]
    assert set(responder.sent[0]) == {names.TEXT_OUTPUT}


def test_streaming_sends_deltas_and_final_rides_on_the_last(harness: Harness) -> None:
    job, responder = ask(harness, stream=True, return_num_output_tokens=True)
    harness.speak(job, "cd")
    responder.wait(lambda: responder.sent, "the first delta")
    job_tokens = JobTokens(job, harness.tokenizer.encode("ef"), None)
    harness.engine.emit(job_tokens)
    harness.finish(job)
    responder.wait_final()
    assert "".join(texts(responder)) == "cdef"
    assert texts(responder)[0] == "cd"
    assert sum(int(t[names.NUM_OUTPUT_TOKENS][0]) for t in responder.sent) == 4


def test_the_optional_outputs(harness: Harness) -> None:
    job, responder = ask(
        harness,
        return_finish_reason=True,
        return_cumulative_logprob=True,
        return_logprobs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        sampling_parameters=json.dumps({"logprobs": 2}),
    )
    assert job.sampling.logprobs == 2
    (token,) = harness.tokenizer.encode("c")
    other = harness.tokenizer.encode("d")[0]
    logprob = TokenLogprob(-0.5, [(token, -0.5), (other, -1.5)])
    harness.engine.emit(JobTokens(job, [token], [logprob]))
    harness.finish(job, FinishReason.STOP)
    responder.wait_final()
    (tensors,) = responder.sent
    assert tensors[names.FINISH_REASON][0] == b"stop"
    assert tensors[names.CUMULATIVE_LOGPROB][0] == np.float32(-0.5)
    assert tensors[names.NUM_INPUT_TOKENS].dtype == np.uint32
    assert (tensors[names.NUM_INPUT_TOKENS][0], tensors[names.NUM_OUTPUT_TOKENS][0]) == (2, 1)
    assert json.loads(tensors[names.LOGPROBS][0]) == [
        {
            str(token): {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            str(other): {"logprob": -1.5, "rank": 2, "decoded_token": "d"},
        }
    ]


def test_a_token_that_is_not_in_the_list_has_its_rank(harness: Harness) -> None:
    """As vLLM's backend has it: never null, and the chosen token first."""
    asked = json.dumps({"logprobs": 1})
    job, responder = ask(harness, return_logprobs=True, sampling_parameters=asked)
    chosen, best = harness.tokenizer.encode("cd")
    harness.engine.emit(JobTokens(job, [chosen], [TokenLogprob(-3.5, [(best, -0.25)], 17)]))
    harness.finish(job)
    responder.wait_final()
    (told,) = json.loads(responder.sent[-1][names.LOGPROBS][0])
    assert list(told.items()) == [
        (str(chosen), {"logprob": -3.5, "rank": 17, "decoded_token": "c"}),
        (str(best), {"logprob": -0.25, "rank": 1, "decoded_token": "d"}),
    ]


def test_the_stop_string_or_token_may_stay_in_the_text(harness: Harness) -> None:
    kept = {"include_stop_str_in_output": True, "stop": "X"}
    job, responder = ask(harness, stream=True, sampling_parameters=json.dumps(kept))
    harness.speak(job, "cdXef")
    responder.wait_final()
    assert "".join(texts(responder)) == "cdX"
    (token,) = harness.tokenizer.encode("e")
    kept = {"include_stop_str_in_output": "true", "stop_token_ids": [token]}
    job, responder = ask(harness, stream=True, sampling_parameters=json.dumps(kept))
    harness.speak(job, "cde")
    harness.finish(job, FinishReason.STOP)
    responder.wait_final()
    assert "".join(texts(responder)) == "cde"


def ask_for_two(harness: Harness, **inputs: object) -> tuple[list[Job], FakeResponder]:
    responder = FakeResponder()
    asked = json.dumps({"n": 2, "seed": 7, "max_tokens": 9})
    harness.service.accept(plain_call("ab", responder, sampling_parameters=asked, **inputs))
    return harness.engine.wait_submitted(2), responder


@pytest.mark.parametrize("stream", [False, True])
def test_several_texts_are_elements_of_the_outputs(harness: Harness, stream: bool) -> None:
    (one, other), responder = ask_for_two(
        harness,
        stream=stream,
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_cumulative_logprob=True,
    )
    assert (one.sampling.seed, other.sampling.seed) == (7, 8)
    harness.speak(one, "cd")
    harness.finish(one, FinishReason.STOP)
    harness.speak(other, "efg")
    harness.finish(other, FinishReason.LENGTH)
    responder.wait_final()
    by_text = [[t[names.TEXT_OUTPUT][at].decode() for t in responder.sent] for at in (0, 1)]
    assert ["".join(pieces) for pieces in by_text] == ["cd", "efg"]
    last = responder.sent[-1]
    assert last[names.FINISH_REASON].tolist() == [b"stop", b"length"]
    assert last[names.NUM_INPUT_TOKENS].tolist() == [2]
    counts = sum(t[names.NUM_OUTPUT_TOKENS] for t in responder.sent)
    assert counts.tolist() == [2, 3]
    assert last[names.CUMULATIVE_LOGPROB].shape == (2,)
    assert stream or len(responder.sent) == 1


def test_an_error_of_one_text_ends_the_request_and_stops_the_others(harness: Harness) -> None:
    (one, other), responder = ask_for_two(harness)
    harness.finish(one, FinishReason.ERROR, Code.ENGINE_ERROR)
    assert responder.refusal()[0] is Code.ENGINE_ERROR
    assert harness.engine.wait_cancelled(1) == [(other, AbortCause.CANCEL)]


def test_a_client_that_is_gone_stops_all_of_its_texts(harness: Harness) -> None:
    jobs, responder = ask_for_two(harness)
    responder.cancelled = True
    cancelled = harness.engine.wait_cancelled(2)
    assert cancelled[:2] == [(job, AbortCause.DISCONNECT) for job in jobs]
    assert responder.refusal()[0] == Code.CANCELLED
    assert not responder.asked_after_final


def test_bad_requests_never_reach_the_engine(harness: Harness) -> None:
    for inputs, word in (
        ({"sampling_parameters": "{"}, "not JSON"),
        ({"sampling_parameters": "[]"}, "JSON object"),
        ({"sampling_parameters": '{"max_tokens": 0}'}, "max_tokens"),
        ({"sampling_parameters": '{"max_tokens": "many"}'}, "max_tokens"),
        ({"sampling_parameters": '{"temprature": 1}'}, "temprature"),
        ({"sampling_parameters": '{"n": 0}'}, "n must be 1 to 128"),
        ({"sampling_parameters": '{"n": 2, "best_of": 3}'}, "best_of must be n"),
        ({"stream": True, "exclude_input_in_output": False}, "streaming"),
        ({"sampling_parameters": '{"deadline_ms": "soon"}'}, "deadline_ms"),
    ):
        code, message = refused(harness, **inputs)
        assert code == Code.INVALID_REQUEST and word in message, inputs
    broken = FakeResponder()
    harness.service.accept(Call({names.TEXT_INPUT: strings(b"\xff")}, {}, "", broken))
    assert "UTF-8" in broken.refusal()[1]
    assert harness.engine.submitted == []


def parse(parameters: dict[str, object] | None = None, **inputs: object):  # type: ignore[no-untyped-def]
    call = plain_call("ab", FakeResponder(), parameters=parameters or {}, **inputs)
    return parse_plain(call, default_deadline_ms=1000.0, unix_ms=5_000.0, vocab_size=256)


@for_each(
    ("stated", "expected"),
    [
        ({}, {"max_tokens": 16}),
        (
            {"temperature": "0.1", "top_p": "0.95", "top_k": "-1"},
            {"temperature": 0.1, "top_p": 0.95, "top_k": -1},
        ),
        ({"n": 1, "best_of": "1", "length_penalty": 1.0, "min_p": None, "detokenize": True}, {}),
        ({"bad_words": [], "stop_token_ids": []}, {"stop_token_ids": ()}),
        (
            {"stop_token_ids": [3, "4"], "skip_special_tokens": "false"},
            {"stop_token_ids": (3, 4), "skip_special_tokens": False},
        ),
        (
            {"repetition_penalty": "1.5", "presence_penalty": 0.5, "frequency_penalty": -0.5},
            {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        ),
        (
            {"min_p": 0.1, "logit_bias": {"97": "-100", "3": 2}},
            {"min_p": 0.1, "logit_bias": ((97, -100.0), (3, 2.0))},
        ),
    ],
)
def test_what_vllm_takes_is_taken_as_vllm_does(
    stated: dict[str, object], expected: dict[str, object]
) -> None:
    """WK-8; in JSON or, without it, as the request's own parameters."""
    found = parse(sampling_parameters=json.dumps(stated)).sampling
    assert {name: getattr(found, name) for name in expected} == expected
    own = {"max_tokens": 3, "temperature": "0"}
    assert parse(own).sampling.max_tokens == 3
    assert parse(own, sampling_parameters="{}").sampling.max_tokens == 16


@for_each(
    ("stated", "why"),
    [
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"stop_token_ids": [256]}, "stop_token_ids"),
        ({"logit_bias": {"256": 1}}, "outside the model's vocabulary, 0 to 255"),
        *(({name: 0}, name) for name in ("first_token_ms", "token_gap_ms")),
        ({"token_gap_ms": "nan"}, "token_gap_ms"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(stated: dict[str, object], why: str) -> None:
    with pytest.raises((InvalidCall, InvalidSampling), match=why):
        parse(sampling_parameters=json.dumps(stated))


def test_what_a_request_does_not_state_is_the_model_s() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_k=20, top_p=0.8, max_tokens=99)

    def sampling(stated: str) -> Sampling:
        call = plain_call("ab", FakeResponder(), sampling_parameters=stated)
        limits = {"default_deadline_ms": 1000.0, "unix_ms": 5_000.0, "vocab_size": 256}
        return parse_plain(call, defaults=defaults, **limits).sampling  # type: ignore[arg-type]

    asked = sampling('{"temperature": "1.0", "top_k": null}')
    assert (asked.temperature, asked.top_k, asked.top_p, asked.max_tokens) == (1.0, 20, 0.8, 16)
    asked = sampling('{"top_k": 0, "top_p": 1, "temperature": 0}')
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.0, 0, 1.0)


@for_each(
    ("stated", "kind", "text"),
    [
        ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", ""),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "{}"),
        ({"guided_decoding": '{"choice": ["a", "ü"]}'}, "choice", '["a", "ü"]'),
        ({"guided_decoding": {"grammar": "start: /a/"}}, "lark", "start: /a/"),
        ({"guided_json": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
    ],
)
def test_what_the_text_must_match_is_vllms(stated: dict[str, object], kind: str, text: str) -> None:
    grammar = parse(sampling_parameters=json.dumps({**stated, "prompt_logprobs": 1})).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (kind, text)
    assert parse(sampling_parameters="{}").grammar is None


@for_each(
    ("stated", "word"),
    [
        ({"structured_outputs": "{"}, "structured_outputs must be a JSON object"),
        ({"structured_outputs": [1]}, "structured_outputs must be a JSON object"),
        ({"structured_outputs": {}}, "exactly one of json, regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one of"),
        ({"structured_outputs": {"jsonn": {}}}, "exactly one of"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json and guided_regex"),
        ({"guided_regex": ""}, "needs its text"),
        ({"guided_choice": "a"}, "guided_choice"),
    ],
)
def test_what_cannot_be_matched_is_told(stated: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidCall, match=word):
        parse(sampling_parameters=json.dumps(stated))


def test_a_grammar_reaches_the_engine(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="the engine of grammars")
    compiler = build_compiler(tokenizer_json(), 262, [1])
    serving = replace(harness.service.serving, grammars=compiler, closings=None)
    monkeypatch.setattr(harness.service._plain, "_serving", lambda: serving)
    job, _ = ask(harness, sampling_parameters='{"guided_regex": "a+"}')
    assert job.constraint is not None and not job.constraint.error
    job, _ = ask(harness)
    assert job.constraint is None
    serving.close_grammars()


def test_a_grammar_is_refused_where_none_can_be_enforced(harness: Harness) -> None:
    _, message = refused(harness, sampling_parameters='{"guided_regex": "a+"}')
    assert "match a grammar" in message


def test_what_the_context_cannot_hold_is_refused(harness: Harness) -> None:
    """WK-8: never cut short in silence, whichever of prompt and answer is too long."""
    for text, max_tokens, words in (
        ("ab", 127, ["max_tokens is 127", "at most 126"]),
        ("a" * 128, 1, ["128 tokens", "at most 127"]),
    ):
        parameters = json.dumps({"max_tokens": max_tokens})
        code, message = refused(harness, text, sampling_parameters=parameters)
        assert code == Code.CONTEXT_OVERFLOW
        assert all(word in message for word in words), message
    ask(harness, "ab", sampling_parameters='{"max_tokens": 126}')
    ask(harness, "a" * 124)
    assert harness.engine.submitted[1].sampling.max_tokens == 4


def test_dl1_the_earliest_deadline_counts_wherever_it_stands() -> None:
    """DL-1 on the plain contract: JSON or request parameter, relative or absolute."""
    assert parse().budget_ms == 1000.0
    assert parse({"deadline_ms": 200}).budget_ms == 200.0
    assert parse({"deadline_ms": 200}, sampling_parameters='{"max_tokens": 2}').budget_ms == 200.0
    assert parse({"deadline_unix_ms": 5_100}).budget_ms == 100.0
    assert parse({"deadline_unix_ms": "5300", "deadline_ms": "200"}).budget_ms == 200.0
    assert parse({"deadline_ms": 5000}).budget_ms == 1000.0
    both = parse(
        {"deadline_ms": 200, "deadline_unix_ms": 5_900, "first_token_ms": 90, "token_gap_ms": 70},
        sampling_parameters='{"deadline_ms": 700, "deadline_unix_ms": 5100, "first_token_ms": 80}',
    )
    assert both.budget_ms == 100.0
    assert (both.stated.first_token_ms, both.stated.token_gap_ms) == (80.0, 70.0)
    assert parse({"deadline_ms": 200}, sampling_parameters='{"deadline_ms": 700}').budget_ms == 200
    assert parse({"deadline_ms": 700}, sampling_parameters='{"deadline_ms": 200}').budget_ms == 200
    for stated, inner in ((200, "NaN"), ("nan", "200")):
        with pytest.raises(InvalidCall, match="a number of milliseconds"):
            parse({"deadline_ms": stated}, sampling_parameters=f'{{"deadline_ms": {inner}}}')
    assert parse({"on_deadline": "partial"}).stated.on_deadline == OnDeadline.PARTIAL
    with pytest.raises(InvalidCall, match="orchestrator"):
        parse({"on_deadline": "fit"})


LONG = "planted" * 15_000


@pytest.mark.parametrize(
    "stated",
    [
        json.dumps({LONG: 1}),
        json.dumps({"best_of": LONG}),
        json.dumps({"on_deadline": LONG}),
        json.dumps({"temperature": LONG}),
        json.dumps({"max_tokens": LONG}),
        json.dumps({"stop": {LONG: 1}}),
        json.dumps({"logit_bias": {LONG: 1}}),
        '{"max_tokens": ' + "7" * 100_000 + "}",
        LONG,
        r'{"stop": "\ud800"}',  # halves of a pair, which are no fault of ours
        r'{"\ud800": 1}',
        r'{"seed": "\udfff"}',
    ],
)
def test_or16_what_a_plain_client_states_is_not_echoed_at_length(
    harness: Harness, caplog: pytest.LogCaptureFixture, stated: str
) -> None:
    code, message = refused(harness, sampling_parameters=stated)
    assert code is Code.INVALID_REQUEST and len(message) < 1024
    assert not caplog.records
