"""``deadline-conformance``: rules, each against a server that keeps it and one that breaks it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.deadline_server import MODEL, DeadlineServer, Manner, serving
from tests.support.sites import running_app
from tests.support.steady_loop import hurry
from tools.conformance import VERSION
from tools.conformance import __main__ as command
from tools.conformance.rules import GROUPS, RULES, Finding, Verdict, chosen
from tools.conformance.run import CHECKS, FAILED, PASSED, UNKNOWN, Report, Stillness, examine
from tools.conformance.server import Effort, Unusable
from tools.conformance.target import BadTarget, Target, read_field, read_saying

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
TOLD = read_saying("X-Timeout-Ms: {ms}")
SMALL = Effort(rounds=1, wave_s=0.06, least_deadline_s=0.1, streams=8, longest=600, patience=5.0)
"""As little as tells a keeper from a breaker."""


def target_of(server: DeadlineServer, **changes: Any) -> Target:
    usual = Target(url=server.url, model=MODEL, deadline=TOLD, partial={"on_deadline": "partial"})
    return replace(usual, **changes)


def verdicts(report: Report) -> dict[str, Verdict]:
    return {finding.rule: finding.verdict for finding in report.findings}


def broken(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings if finding.verdict is Verdict.FAIL}


@pytest.fixture
async def hurried() -> None:
    """Waits are short: server and client are on one loop."""
    hurry(10)


@pytest.mark.usefixtures("hurried")
async def test_a_server_that_keeps_all_of_it_passes_every_rule() -> None:
    async with serving() as server:
        report = await examine(target_of(server), SMALL)
    found = verdicts(report)
    assert list(found) == [rule.id for rule in RULES]
    assert set(found.values()) == {Verdict.PASS}, report.text()
    assert report.status == PASSED


BREAKERS = {
    "passes over deadlines": (
        Manner(heeds=False, predicts=False),
        ("expiry", "partial"),
        {"expiry.stream", "expiry.whole", "expiry.past", "expiry.unreadable", "partial.answer"},
    ),
    "cuts without a word": (Manner(tells=False), ("expiry",), {"expiry.told"}),
    "guesses at what it cannot read": (Manner(reads=False), ("expiry",), {"expiry.unreadable"}),
    "keeps what was hung up": (
        Manner(linger_s=0.25),
        ("hangup",),
        {"hangup.stream", "hangup.whole"},
    ),
    "serves everybody late": (
        Manner(heeds=False, predicts=False, waiting=1000, linger_s=0.25, works_for_nobody=True),
        ("overload",),
        {"overload.met", "overload.early", "overload.waste", "overload.ends"},
    ),
}


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", BREAKERS)
async def test_a_server_that_breaks_a_rule_fails_it_and_no_other(name: str) -> None:
    manner, only, expected = BREAKERS[name]
    async with serving(manner) as server:
        report = await examine(target_of(server), replace(SMALL, patience=4.0), only)
    assert broken(report) == expected, report.text()
    assert report.status == FAILED


@pytest.mark.usefixtures("hurried")
async def test_a_server_of_unstreamed_completions_alone_is_tested() -> None:
    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        assert isinstance(body["prompt"], str) and "messages" not in body
        await asyncio.sleep(0.002 * body["max_tokens"])
        choice = {"text": "tide " * body["max_tokens"], "finish_reason": "length"}
        usage = {"completion_tokens": body["max_tokens"]}
        return web.json_response({"choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with running_app(app) as port:
        url = f"http://127.0.0.1:{port}/v1"
        report = await examine(Target(url, MODEL, TOLD, is_chat=False), SMALL, ["expiry"])
    broken_rules = {"expiry.stream", "expiry.whole", "expiry.past", "expiry.unreadable"}
    assert broken(report) == broken_rules, report.text()


def test_each_rule_has_a_breaker() -> None:
    """The keeper has all of them."""
    assert set().union(*(expected for _, _, expected in BREAKERS.values())) == {
        rule.id for rule in RULES
    }
    assert set(CHECKS) == set(GROUPS)


@pytest.mark.usefixtures("hurried")
async def test_no_server_is_blamed_for_a_client_that_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stands_still(self: Stillness) -> None:
        self.worst_s = 1.0

    monkeypatch.setattr(Stillness, "watch", stands_still)
    async with serving(Manner(heeds=False)) as server:
        report = await examine(target_of(server), SMALL, ["expiry"])
    assert broken(report) == {"expiry.past", "expiry.unreadable"}, report.text()
    late = next(finding for finding in report.findings if finding.rule == "expiry.stream")
    assert late.verdict is Verdict.UNMEASURED
    assert "this client itself stalled for 1.00 s" in late.said


@pytest.mark.usefixtures("hurried")
async def test_what_was_never_told_is_not_judged() -> None:
    """A server that knows no deadlines, and whose clients hang up."""
    async with serving(Manner(heeds=False, predicts=False)) as server:
        target = Target(url=server.url, model=MODEL, deadline=read_saying("hang-up"))
        report = await examine(target, SMALL, ["expiry", "partial"])
    found = verdicts(report)
    assert set(found.values()) == {Verdict.NOT_APPLICABLE}
    assert report.status == PASSED


async def test_fields_that_a_server_refuses_are_left_out() -> None:
    async with serving(Manner(takes_ignore_eos=False)) as server:
        report = await examine(target_of(server), SMALL, ["expiry.stream"])
    assert verdicts(report) == {"expiry.stream": Verdict.PASS}


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def answering(chat: Handler) -> AsyncIterator[str]:
    """The base URL of a server that answers chats so."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    async with running_app(app) as port:
        yield f"http://127.0.0.1:{port}/v1"


async def is_a_page(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html><body>Welcome</body></html>", content_type="text/html")


async def wants_a_key(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no such key"}}, status=401)


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        (is_a_page, r"a chat of 8 tokens .*: text/html instead of JSON: '<html>.*is the base URL"),
        (wants_a_key, r"wants another key: status 401: no such key"),
    ],
)
async def test_a_server_that_cannot_be_tested_is_told_why(chat: Handler, said: str) -> None:
    async with answering(chat) as url:
        with pytest.raises(Unusable, match=said):
            await examine(Target(url, MODEL, TOLD), replace(SMALL, patience=0.3))


async def test_a_server_that_is_away_is_told(unused_tcp_port: int) -> None:
    away = Target(f"http://127.0.0.1:{unused_tcp_port}/v1", MODEL, TOLD)
    with pytest.raises(Unusable, match=r"nobody answers at http://127\.0\.0\.1:\d+/v1: .*running"):
        await examine(away, SMALL)


@pytest.mark.usefixtures("hurried")
async def test_a_run_ends_within_its_bound() -> None:
    async with serving() as server:
        with pytest.raises(Unusable, match=r"bound of 0\.1 s was reached; --seconds"):
            await examine(target_of(server), replace(SMALL, seconds=0.1))


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("X-Timeout-Ms: {ms}", "header", "1500"),
        ("deadline_ms={ms}", "body", "1500"),
        ("X-Deadline: {rfc3339}", "header", r"\d{4}-\d\d-\d\dT.*\+00:00"),
    ],
)
def test_a_deadline_is_said_as_the_template_has_it(text: str, place: str, said: str) -> None:
    saying = read_saying(text)
    assert (saying.place, saying.is_told, str(saying)) == (place, True, text)
    headers, body = dict[str, str](), dict[str, object]()
    saying.put(saying.said(1.5), headers, body)
    (value,) = (headers or body).values()
    assert re.fullmatch(said, str(value))
    assert isinstance(value, int) == (place == "body")
    assert saying.unreadable() == "soon"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: read_saying("X-Timeout-Ms"), "says no deadline; expected something like 'X-"),
        (lambda: read_saying("X-Timeout-Ms: {minutes}"), "unknown placeholder"),
        (lambda: read_field("on_deadline"), "expected name=value"),
        (lambda: Target("127.0.0.1:8000", MODEL, TOLD), "not a base URL; expected for instance"),
        (lambda: Target("http://a:b@h/v1", MODEL, TOLD), "a user or password in it"),
        (lambda: Target("http://h/v1", "", TOLD), "no model is named"),
        (lambda: command.effort_of({"seconds": 0.0}), "seconds must be above 0"),
    ],
)
def test_arguments_that_cannot_be_used_are_told(make: Callable[[], object], said: str) -> None:
    with pytest.raises(BadTarget, match=said):
        make()


def test_the_page_has_the_rules() -> None:
    page = PAGE.read_text()
    assert "(../tools/conformance/rules.md)" in page
    assert all(f"| `{group}` |" in page for group in GROUPS)
    assert f"Version {VERSION}." in page
    assert all(f"`--{name}`" in page for name in command.OPTIONS if name not in ("url", "model"))
    assert chosen(["expiry", "overload.met"])[-1].id == "overload.met"


def report_of(*findings: Finding) -> Report:
    made = "2026-01-01T00:00:00+00:00"
    return Report(VERSION, made, "http://h/v1", MODEL, str(TOLD), "a server", {}, 1, 1.0, findings)


def test_a_report_is_text_and_json_and_a_status() -> None:
    well = Finding("expiry.told", Verdict.PASS, "3 of 3")
    bad = Finding("overload.met", Verdict.FAIL, "10 %", {"met": 0.1, "late": float("inf")})
    unknown = Finding("hangup.stream", Verdict.UNMEASURED, "too alike to tell")
    report = report_of(well, bad, unknown)
    told = json.loads(json.dumps(report.json(), allow_nan=False))
    assert (told["schema"], told["version"], told["created"][:4]) == (2, VERSION, "2026")
    assert told["findings"][1]["figures"] == {"met": 0.1}
    assert told["findings"][0]["verdict"] == "pass"
    assert re.search(r"^FAIL +overload\.met +At twice", report.text(), re.M)
    assert "too alike to tell" in report.text()
    assert report.status == FAILED
    assert (report_of(well, unknown).status, report_of(well).status) == (UNKNOWN, PASSED)
