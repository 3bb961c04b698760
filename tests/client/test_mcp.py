"""``tidegate mcp``: what its relay does between a client and servers that the test plays, and the
command in front of a real server (``tests/support/mcp_server.py``)."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the package mcp is not installed: pip install -e '.[mcp]'")

import anyio
import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.message import SessionMessage
from mcp_types import CallToolResult, CreateMessageResult, TextContent, jsonrpc_message_adapter

from tests.support.processes import eventually
from tidegate import deadline
from tidegate.cli.main import main
from tidegate.proxy.limits import CallLimits, TimeLimit
from tidegate.proxy.relay import Relay, Sink, Source
from tidegate.tools import TIMEOUT_META_KEY, timeout_meta

CHECKOUT = Path(__file__).parents[2]
SERVER = CHECKOUT / "tests/support/mcp_server.py"
ENVIRONMENT = {"PYTHONPATH": str(CHECKOUT / "client")}
PATIENCE_S = 60.0
SOON_MS = 30
"""Time of calls that are to miss it."""

Message = dict[str, Any]


class End:
    """A client or a server that the test plays: what it says, and what it gets to hear."""

    def __init__(self) -> None:
        self._said, self.source = anyio.create_memory_object_stream[SessionMessage | Exception](99)
        self.sink, self._heard = anyio.create_memory_object_stream[SessionMessage](99)

    async def say(self, **message: Any) -> None:
        text = json.dumps({"jsonrpc": "2.0", **message})
        await self._said.send(SessionMessage(jsonrpc_message_adapter.validate_json(text)))

    async def hear(self) -> Message:
        async with asyncio.timeout(PATIENCE_S):
            heard = await self._heard.receive()
        said: Message = heard.message.model_dump(mode="json", exclude_unset=True)
        assert said.pop("jsonrpc") == "2.0"
        return said

    def heard_nothing_more(self) -> bool:
        return self._heard.statistics().current_buffer_used == 0

    def hang_up(self) -> None:
        self._said.close()

    def close(self) -> None:
        for stream in (self._said, self.source, self.sink, self._heard):
            stream.close()


class Ends:
    """The client, and the servers that the relay has started so far."""

    def __init__(self) -> None:
        self.client = End()
        self.servers: list[End] = []
        self._started = asyncio.Condition()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[Source, Sink]]:
        end = End()
        async with self._started:
            self.servers.append(end)
            self._started.notify_all()
        try:
            yield end.source, end.sink
        finally:
            end.close()

    async def server(self, number: int = 1) -> End:
        """The server that was started as the ``number``-th."""
        async with asyncio.timeout(PATIENCE_S), self._started:
            await self._started.wait_for(lambda: len(self.servers) >= number)
        return self.servers[number - 1]


@asynccontextmanager
async def relayed(limits: CallLimits | None = None) -> AsyncIterator[Ends]:
    ends = Ends()
    relay = Relay(ends.connect, limits or CallLimits())
    running = asyncio.create_task(relay.run(ends.client.source, ends.client.sink))
    try:
        yield ends
    finally:
        ends.client.hang_up()
        await running
        ends.client.close()


def call(number: int, tool: str = "slow", **meta: Any) -> Message:
    params: Message = {"name": tool, "arguments": {}} | ({"_meta": meta} if meta else {})
    return {"id": number, "method": "tools/call", "params": params}


def error_of(answer: Message) -> str:
    """Text of a tool's result that is an error."""
    assert answer["result"]["isError"] is True
    [content] = answer["result"]["content"]
    text: str = content["text"]
    return text


async def test_what_it_does_not_know_passes_as_it_is() -> None:
    async with relayed() as ends:
        server, client = await ends.server(), ends.client
        for said in (
            {"id": "a", "method": "x/unknown", "params": {"deep": [{"none": None, "ü": 1e-9}]}},
            {"id": 7, "method": "tools/list"},
            {"method": "notifications/x", "params": {"_meta": {"traceparent": "00-1-1-00"}}},
            call(8, progressToken=3) | {"method": "resources/read"},
        ):
            await client.say(**said)
            assert await server.hear() == said
        for said in (
            {"method": "notifications/progress", "params": {"progressToken": 3, "progress": 1}},
            {"method": "notifications/tools/list_changed"},
            {"id": "a", "result": {"anything": [None]}},
            {"id": 7, "error": {"code": -5, "message": "no", "data": {"more": True}}},
        ):
            await server.say(**said)
            assert await client.hear() == said


async def test_a_server_asks_and_hears_the_answer_by_its_own_id() -> None:
    async with relayed() as ends:
        server, client = await ends.server(), ends.client
        for number in (0, 1):
            await server.say(id=number, method="sampling/createMessage", params={"n": number})
        asked = [await client.hear(), await client.hear()]
        assert [one["params"]["n"] for one in asked] == [0, 1]
        await client.say(id=asked[1]["id"], result={"said": "b"})
        assert await server.hear() == {"id": 1, "result": {"said": "b"}}
        await server.say(method="notifications/cancelled", params={"requestId": 0})
        cancelled = {"requestId": asked[0]["id"]}
        assert await client.hear() == {"method": "notifications/cancelled", "params": cancelled}


async def test_a_call_ends_when_its_time_is_over_and_others_go_on() -> None:
    async with relayed() as ends:
        server, client = await ends.server(), ends.client
        await client.say(**call(1, **{TIMEOUT_META_KEY: SOON_MS}, other="kept"))
        meta = (await server.hear())["params"]["_meta"]
        assert 0 <= meta.pop(TIMEOUT_META_KEY) <= SOON_MS
        assert meta == {"other": "kept"}
        told = await server.hear()
        assert (told["method"], told["params"]["requestId"]) == ("notifications/cancelled", 1)
        answer = await client.hear()
        assert answer["id"] == 1
        assert error_of(answer) == (
            "the tool 'slow' was not done within 0.03 s (no more was left of the run's time) and "
            "was cancelled"
        )
        await client.say(**call(2))
        assert (await server.hear())["id"] == 2
        await server.say(id=1, result={"too": "late"})
        await server.say(id=2, result={"in": "time"})
        assert await client.hear() == {"id": 2, "result": {"in": "time"}}


async def test_other_requests_than_tools_end_with_an_error_of_json_rpc() -> None:
    async with relayed() as ends:
        await ends.client.say(
            id=1, method="resources/read", params={"_meta": {TIMEOUT_META_KEY: SOON_MS}}
        )
        error = (await ends.client.hear())["error"]
        assert error["code"] == -32001
        assert "resources/read was not done within 0.03 s" in error["message"]


async def test_a_call_that_the_client_cancels_is_over() -> None:
    async with relayed(CallLimits(default_s=PATIENCE_S)) as ends:
        server, client = await ends.server(), ends.client
        await client.say(**call(1))
        await server.hear()
        cancelled = {"method": "notifications/cancelled", "params": {"requestId": 1}}
        await client.say(**cancelled)
        assert await server.hear() == cancelled
        await server.say(id=1, result={"too": "late"})
        await server.say(method="notifications/last")
        assert await client.hear() == {"method": "notifications/last"}


@pytest.mark.parametrize("stated", ["soon", True, None, [1]])
async def test_a_time_that_is_none_is_refused_and_nothing_is_called(stated: object) -> None:
    async with relayed() as ends:
        server, client = await ends.server(), ends.client
        await client.say(**call(1, **{TIMEOUT_META_KEY: stated}))
        error = (await client.hear())["error"]
        assert error["code"] == -32602
        assert f'"{TIMEOUT_META_KEY}" in _meta is a number, the ms' in error["message"]
        await client.say(**call(2, **{TIMEOUT_META_KEY: -5}))
        assert "'slow' was not called: no time was left" in error_of(await client.hear())
        assert server.heard_nothing_more()


async def test_what_is_no_message_gets_an_error_and_the_next_one_passes() -> None:
    async with relayed() as ends:
        server, client = await ends.server(), ends.client
        await client._said.send(ValueError("expected an object"))
        error = (await client.hear())["error"]
        assert (error["code"], "expected an object" in error["message"]) == (-32700, True)
        await server._said.send(ValueError("printed by mistake"))
        await client.say(id=1, method="ping")
        assert await server.hear() == {"id": 1, "method": "ping"}


HANDSHAKE: Message = {"method": "initialize", "params": {"protocolVersion": "2025-11-25"}}
INITIALIZED: Message = {"method": "notifications/initialized"}


async def greet(ends: Ends) -> None:
    """Have the client and the first server do what comes first."""
    server, client = await ends.server(), ends.client
    for number, said in enumerate(
        (
            HANDSHAKE,
            {"method": "resources/subscribe", "params": {"uri": "a:1"}},
            {"method": "resources/subscribe", "params": {"uri": "a:2"}},
            {"method": "resources/unsubscribe", "params": {"uri": "a:1"}},
        )
    ):
        await client.say(id=number, **said)
        await server.hear()
        await server.say(id=number, result={})
        await client.hear()
    await client.say(**INITIALIZED)
    await server.hear()


async def test_a_server_that_dies_is_started_again_and_told_what_the_first_one_was() -> None:
    async with relayed() as ends:
        await greet(ends)
        first, client = await ends.server(), ends.client
        await first.say(id=0, method="roots/list")
        asked = await client.hear()
        await client.say(**call(5))
        await first.hear()
        first.hang_up()
        taken_back = await client.hear()
        assert taken_back["params"]["requestId"] == asked["id"]
        told = error_of(await client.hear())
        assert "'slow' was not answered: the server ended (it closed its output)" in told
        second = await ends.server(2)
        await client.say(**call(6))  # waits for the new one
        await client.say(id=asked["id"], result={"for": "the first"})
        again = await second.hear()
        own = again.pop("id")
        assert again == HANDSHAKE
        await second.say(method="notifications/message", params={"data": "starting"})
        assert (await client.hear())["method"] == "notifications/message"
        await second.say(id=own, result={})
        assert await second.hear() == INITIALIZED
        subscription = await second.hear()
        assert subscription["params"] == {"uri": "a:2"}
        await second.say(id=subscription["id"], result={})
        assert (await second.hear())["id"] == 6
        await second.say(id=6, result={"well": True})
        assert await client.hear() == {"id": 6, "result": {"well": True}}


async def test_a_server_that_keeps_dying_is_started_more_and_more_rarely() -> None:
    async with relayed() as ends:
        for number in (1, 2):
            (await ends.server(number)).hang_up()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await ends.client.say(**call(1))
                if "there is no server: 2 times in a row" in error_of(await ends.client.hear()):
                    break
        third = await ends.server(3)
        await ends.client.say(**call(2))
        assert (await third.hear())["id"] == 2


def test_the_earliest_limit_counts() -> None:
    limits = CallLimits(default_s=60, by_tool={"search": 5})

    def seconds(tool: str, stated_ms: float | None = None, method: str = "tools/call") -> object:
        meta = {} if stated_ms is None else {"_meta": {TIMEOUT_META_KEY: stated_ms}}
        limit = limits.of(method, {"name": tool, **meta})
        return limit.seconds if isinstance(limit, TimeLimit) else limit

    assert seconds("other") == 60
    assert seconds("other", 90_000) == 90  # what is stated replaces what is usual
    assert seconds("search") == seconds("search", 90_000) == 5
    assert seconds("search", 1000) == 1
    assert seconds("search", method="prompts/get") is None
    assert seconds("search", 1000, method="prompts/get") == 1
    assert CallLimits().of("tools/call", {}) is None


# ── the command in front of a real server ────────────────────────────────────────────────────


def proxy(*server: object, options: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "tidegate", "mcp", *options, "--", *map(str, server)]


def client_of(command: list[str], mode: str, **more: Any) -> Client:
    [program, *words] = command
    started = StdioServerParameters(command=program, args=words, env=ENVIRONMENT)
    # pytest has put something of its own in place of sys.stderr.
    return Client(stdio_client(started, errlog=sys.__stderr__), mode=mode, **more)


def text_of(result: CallToolResult) -> str:
    [content] = result.content
    assert isinstance(content, TextContent)
    return content.text


async def until_noted(file: Path, count: int = 1) -> list[str]:
    """Lines of a file, once there are so many."""

    def lines() -> list[str]:
        return file.read_text().splitlines() if file.exists() else []

    await asyncio.to_thread(eventually, lambda: len(lines()) >= count, lambda: str(lines()))
    return lines()


async def answer_for_the_model(*_: object) -> CreateMessageResult:
    content = TextContent(type="text", text="hello")
    return CreateMessageResult(role="assistant", content=content, model="m")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_a_real_server_by_each_protocol(mode: str, tmp_path: Path) -> None:
    """Tools that take too long, heed nothing, end the server or stop it, beside quick ones."""
    through = proxy(sys.executable, SERVER, tmp_path, options=("--tool", "hang=300ms"))
    async with client_of(through, mode, sampling_callback=answer_for_the_model) as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert {"echo", "wait", "hang", "die"} <= tools
        assert text_of(await client.call_tool("echo", {"text": "one"})) == "one"
        assert (await client.read_resource("note://one")).contents[0].text == "a note"
        assert text_of(await client.call_tool("left")) == "60000"
        with deadline(30):
            left_ms = int(text_of(await client.call_tool("left", meta=timeout_meta())))
        assert 0 < left_ms <= 30_000
        if mode == "legacy":
            asked = await client.call_tool("ask", {"question": "how"})
            assert text_of(asked) == "it said hello"

        async def progressed(progress: float, total: float | None, message: str | None) -> None:
            heard.append(message)

        heard: list[str | None] = []
        late = await client.call_tool(
            "wait",
            {"seconds": 3600},
            progress_callback=progressed,
            meta={TIMEOUT_META_KEY: 1000},
        )
        assert late.is_error and "'wait' was not done within 1 s" in text_of(late)
        assert heard == ["waiting"]
        assert await until_noted(tmp_path / "cancelled") == ["wait"]
        hung, quick = await asyncio.gather(
            client.call_tool("hang"), client.call_tool("echo", {"text": "two"})
        )
        assert "the limit of this tool (tidegate mcp --tool)" in text_of(hung)
        assert text_of(quick) == "two"
        died = await client.call_tool("die")
        assert died.is_error and "the server ended" in text_of(died)
        assert text_of(await client.call_tool("echo", {"text": "three"})) == "three"
        for name in ("freeze", "left"):  # from now on the server hears nothing
            frozen = await client.call_tool(name, meta={TIMEOUT_META_KEY: 200})
            assert frozen.is_error and f"{name!r} was not done within 0.2 s" in text_of(frozen)
    started = await until_noted(tmp_path / "started", 2)
    assert len(started) == 2
    for pid in started:
        assert not _lives(int(pid))


@pytest.mark.slow
async def test_a_server_behind_a_url(tmp_path: Path, unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}/mcp"
    serving = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), str(tmp_path), str(unused_tcp_port)
    )
    try:
        await until_answered(url)
        for mode in ("legacy", "2026-07-28"):
            async with client_of(proxy(url), mode) as client:
                await client.list_tools()
                assert text_of(await client.call_tool("echo", {"text": "one"})) == "one"
                late = await client.call_tool(
                    "wait",
                    {"seconds": 3600},
                    meta={TIMEOUT_META_KEY: 500},
                )
                assert late.is_error and "'wait' was not done within 0.5 s" in text_of(late)
                assert text_of(await client.call_tool("echo", {"text": "two"})) == "two"
        assert await until_noted(tmp_path / "cancelled", 2) == ["wait", "wait"]
    finally:
        serving.kill()
        await serving.wait()


async def until_answered(url: str) -> None:
    async with asyncio.timeout(PATIENCE_S), httpx2.AsyncClient() as http:
        while True:
            try:
                await http.get(url)
            except httpx2.TransportError:
                await asyncio.sleep(0.05)
            else:
                return


@pytest.mark.slow
async def test_sigterm_ends_the_server_too_though_stdin_is_open(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *proxy(sys.executable, SERVER, tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | ENVIRONMENT,
    )
    [pid] = await until_noted(tmp_path / "started")
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):
        assert await process.wait() == 0
    assert not _lives(int(pid))
    assert process.stdin is not None
    process.stdin.close()


def test_a_server_that_cannot_be_started_is_said_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        proxy(tmp_path / "no-such-server"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "tidegate mcp: the server cannot be started: " in done.stderr
    assert "no-such-server" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing argument 'SERVER"),
        (["--tool", "5s", "x"], "expected TOOL=TIME such as search=5s, got '5s'"),
        (["--tool", "a=soon", "x"], "expected a time such as 2s"),
        (["--header", "secret", "x"], 'expected "Name: value"'),
    ],
)
def test_wrong_words(words: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["mcp", *words])
    err = capsys.readouterr().err
    assert said in err and "secret" not in err


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("tidegate.cli.mcp.find_spec", lambda name: None)
    assert main(["mcp", "x"]) == 1
    assert "pip install mcp==" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["mcp", "http://127.0.0.1/mcp", "--timeout", "5s"]) == 2
    assert "options go before it" in capsys.readouterr().err


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
