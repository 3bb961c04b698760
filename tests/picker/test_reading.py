"""What requests, answers and metrics say; what cannot be read is passed over."""

import json
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict
from pydantic import ValidationError

from orchestrator.api.http.context import context_of
from orchestrator.clock import Instant
from orchestrator.tasks.deadline import DeadlineConfig
from picker.answer import MAX_BYTES, AnswerReader
from picker.asked import Asking, read_asked
from picker.pod import AnswerEnd
from picker.section import PickerSection
from picker.stream import DIALECTS
from picker.vllm_page import NotAPage, VllmPage, read_page
from tests.support.cases import for_each
from tests.support.pods import events

CHAT = "/v1/chat/completions"


def asked(body: Any, path: str = CHAT, **headers: str) -> Asking:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = CIMultiDict({":path": path} | {k.replace("_", "-"): v for k, v in headers.items()})
    context = context_of(path, sent, Instant(100.0, 1000.0), DIALECTS)
    return read_asked(sent, data, context, DeadlineConfig())


def test_the_earliest_deadline_of_head_and_body() -> None:
    message = {"messages": [], "deadline_ms": 900}
    assert asked(message).deadline.at == pytest.approx(100.9)
    assert asked(message, x_timeout_ms="500").deadline.source == "X-Timeout-Ms"
    # An SDK's timeout bounds what comes in one piece, a gateway's what somebody waits for.
    body = {"messages": []}
    assert asked(body, x_stainless_timeout="2").deadline.at == pytest.approx(102.0)
    assert asked(body | {"stream": True}, x_stainless_timeout="2").deadline.at == 400.0
    gateway = {"x_envoy_expected_rq_timeout_ms": "3000"}
    assert asked(body, **gateway).deadline.at == pytest.approx(103.0)
    assert asked(body, "/v2/tasks", **gateway).deadline.at == 400.0
    parts = asked(body | {"first_token_ms": 250}).parts
    assert parts.first_token_at == parts.cut_at == pytest.approx(100.25)


@for_each(
    ("body", "chars", "ids", "cap", "least"),
    [
        ({"messages": [{"role": "user", "content": "abcd"}], "max_tokens": 7}, 8, 0, 7, 1),
        ({"messages": [{"content": [{"type": "text", "text": "ab"}]}]}, 2, 0, 0, 1),
        ({"messages": [{"content": [{"type": "x", "image_url": {"url": "data:…"}}]}]}, 0, 0, 0, 1),
        ({"system": "abc", "messages": [{"content": "d"}], "max_tokens": 3}, 4, 0, 3, 1),
        ({"prompt": "abc", "ignore_eos": True, "max_tokens": 50}, 3, 0, 50, 50),
        ({"prompt": "abc", "ignore_eos": True, "max_tokens": 50, "stop": "."}, 3, 0, 50, 1),
        ({"prompt": [5, 6, 7], "min_tokens": 4}, 0, 3, 0, 4),
        ({"input": "abcde", "max_output_tokens": 9}, 5, 0, 9, 1),
    ],
)
def test_how_much_is_asked_for(body: Any, chars: int, ids: int, cap: int, least: int) -> None:
    read = asked(body)
    assert read.generates
    assert (read.prompt_chars, read.prompt_ids, read.cap, read.least_tokens) == (
        chars,
        ids,
        cap,
        least,
    )


@for_each(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 50_000]
    + [json.dumps(one).encode() for one in ({"input": "x"}, {"model": 3}, {"deadline_ms": "soon"})],
)
def test_what_asks_for_no_text_or_cannot_be_read_is_picked_for_all_the_same(body: bytes) -> None:
    read = asked(body)
    assert not read.generates and read.deadline.is_default


def test_odd_values_are_passed_over() -> None:
    odd = {
        "messages": "x",
        "max_tokens": "many",
        "min_tokens": -4,
        "deadline_ms": True,
        "model": [],
    }
    read = asked(odd)
    assert (read.generates, read.cap, read.least_tokens, read.model) == (True, 0, 1, "")
    assert asked({"messages": [None, 3, {"content": {"a": 1}}], "max_tokens": 1e14}).cap == 2**20
    huge = b'{"messages": [], "max_tokens": 1%s, "deadline_ms": 1e999}' % (b"0" * 500)
    assert asked(huge).cap == 0 and asked(huge).deadline.is_default


USAGE = {"prompt_tokens": 9, "completion_tokens": 4}
ANSWERS: list[tuple[str, list[bytes], AnswerEnd | None]] = [
    ("text/event-stream", events(4, USAGE), AnswerEnd(4, 9)),
    ("text/event-stream", events(4, USAGE)[:-2], AnswerEnd(5, 0, is_told=False)),
    ("text/event-stream", events(4, USAGE)[:3], None),
    (
        "application/json",
        [b'{"choices":[{"finish_reason":"length"},{}],', b'"usage":{"completion_tokens":6}}'],
        AnswerEnd(3, 0, finished=False),
    ),
    (
        "application/json; charset=utf-8",
        [b'{"stop_reason":"end_turn","usage":{"input_tokens":2,"output_tokens":8}}'],
        AnswerEnd(8, 2),
    ),
    (
        "text/event-stream",
        [
            b'data: {"type":"message_start","message":{"usage":{"input_tokens":5}}}\n\n',
            b'data: {"type":"content_block_delta","delta":{"text":"a"}}\n\ndata: {"type":"message',
            b'_delta","delta":{"stop_reason":"max_tokens"},"usage":{"output_tokens":3}}\n\n',
        ],
        AnswerEnd(3, 5, finished=False),
    ),
    ("application/json", [b'{"error":"no"}'], None),
    ("application/json", [b"x" * (MAX_BYTES + 1)], None),
    ("text/html", [b"<p>"], None),
]


@for_each(("kind", "chunks", "ended"), ANSWERS)
def test_how_an_answer_ended(kind: str, chunks: list[bytes], ended: AnswerEnd | None) -> None:
    reader = AnswerReader(kind)
    for chunk in chunks:
        reader.feed(chunk)
    assert reader.end() == ended
    packed = AnswerReader(kind, "gzip")
    packed.feed(chunks[0])
    assert packed.end() is None and packed.tokens == 0


PAGE = """\
# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="x, y",waiting_lora_adapters=""} 1.7e9
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 4.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 40.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 1.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 80.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 0.8
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 500.0
python_gc_objects_collected_total{generation="0"} 1.0
"""


def test_a_page_of_vllms_metrics() -> None:
    assert read_page(PAGE) == VllmPage(
        running=5,
        waiting=1,
        kv_used=0.5,
        kv_blocks=100,
        models=frozenset({"m", "x", "y"}),
        steps=40,
        gaps=80,
        gaps_s=0.8,
        tokens=100,
        prompt_tokens=500,
    )
    older = PAGE.replace("kv_cache", "gpu_cache").replace(
        "inter_token_latency", "time_per_output_token"
    )
    assert read_page(older) == read_page(PAGE)


@for_each(
    "page",
    [
        "",
        "<html>",
        "vllm:num_requests_running 1\n",
        PAGE.replace("3.0", "NaN"),
        PAGE + "vllm:num_requests_waiting{",
    ],
)
def test_what_is_no_such_page_is_said_to_be_none(page: str) -> None:
    with pytest.raises(NotAPage):
        read_page(page)


@for_each(
    ("setting", "complaint"),
    [
        ({"endpoints": "pods.default:8000"}, "write dns:pods.default:8000"),
        ({"endpoints": "vllm+http://10.0.0.1:8000?tokenizer=x"}, "without a scheme"),
        ({"endpoints": "10.0.0.1"}, "expected host:port"),
        ({"tls_key": Path("key.pem")}, "one is of no use without the other"),
    ],
)
def test_settings_that_do_not_fit_say_why(setting: Any, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        PickerSection(**setting)
