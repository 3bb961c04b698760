"""TLS and mutual TLS on every way to Triton, against gRPC's own servers (OR-25)."""

import ast
import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from catalog.errors import PoolFileInvalid
from orchestrator.lanes.grpc_call import CallEnded, open_call
from orchestrator.settings import InvalidSettings, load_settings
from orchestrator.tls import SETTING, Tls, open_channel, stated_tls
from pool.engines.triton import TritonInstall, TritonPorts, TritonSpec, triton_command
from pool.fleet.specs import InstanceSpec, OrchestratorSpec, specs_of
from pool.pool_file import parse_pool_file
from tests.clips.api.test_slots import serving, submit, until_ended
from tests.orchestrator.conftest import OPERATOR, MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.certificates import SERVER_NAME, Certificates, Pair, certificates
from tests.support.echo import METHOD, Echo
from tests.support.fake_slots import FakeClips

TASK = {"prompt": "x", "max_tokens": 3}


@pytest.fixture
async def made() -> Certificates:
    return await asyncio.to_thread(certificates)


def as_client(made: Certificates, pair: Pair | None = None, **more: str) -> dict[str, Any]:
    """As a file has it."""
    shown = {} if pair is None else {"certificate": str(pair.certificate), "key": str(pair.key)}
    return {"ca": str(made.ca.certificate), **shown, **more}


async def outcome_of(service: Service) -> str:
    await service.ask("POST", "/v2/tasks", 202, json=TASK)
    await service.until(lambda: bool(service.outcomes()))
    return service.outcomes()[0]


async def test_lanes_clips_and_swaps_go_over_it(
    made: Certificates, make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker(credentials=made.credentials(mutual=True))
    worker.slots = FakeClips()
    worker.can_load("other")
    tls = as_client(made, made.client)
    service = await serving(await make_service(worker, lanes__tls=tls, slots__serve=True))
    assert await outcome_of(service) == "met"
    assert (await until_ended(service, await submit(service)))["outcome"] == "met"
    path = f"/v2/instances/{worker.address}/swap"
    body = {"model": "other", "wait": True}
    assert (await service.ask("POST", path, json=body, headers=OPERATOR))["phase"] == "done"


# ── what does not fit together ───────────────────────────────────────────────────────────────


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    server = Echo()
    yield server
    await server.stop()


async def talk(address: str, tls: Tls | None, message: bytes = b"hello") -> None:
    """Have ``message`` back. Raises ``CallEnded``."""
    back: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def take(messages: list[bytes]) -> None:
        back.set_result(b"".join(messages))

    call = await open_call(address, METHOD, take, 60.0, tls)
    try:
        call.send(message)
        await asyncio.wait([back, call.ended], return_when=asyncio.FIRST_COMPLETED)
        if call.ended.done():
            await call.ended
        assert await back == message
    finally:
        await call.close()


async def why_not(address: str, **settings: Any) -> str:
    tls = await asyncio.to_thread(lambda: Tls(**settings)) if settings else None
    with pytest.raises(CallEnded) as failure:
        await talk(address, tls)
    return str(failure.value)


@pytest.mark.parametrize("as_file", [True, False])
async def test_without_ca_grpcs_own_client_trusts_whom_the_system_does(
    echo: Echo, made: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_file: bool
) -> None:
    """It would take the list that it brings with it, and none of an operator's own."""
    trusted = tmp_path / ("trusted.pem" if as_file else "0123abcd.0")
    await asyncio.to_thread(trusted.write_bytes, made.ca.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "trusted.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    await echo.start(made.credentials())
    async with await open_channel(echo.address, Tls(), ()) as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(b"hello")
        assert await call.read() == b"hello"


@pytest.mark.parametrize(
    ("shown", "is_secure", "words"),
    [
        ("server", False, "TLS"),
        ("", True, "speaks no TLS"),
        ("stranger", True, "its certificate is not trusted: ca of"),
    ],
)
async def test_what_does_not_speak_to_each_other_says_why(
    echo: Echo, made: Certificates, shown: str, is_secure: bool, words: str
) -> None:
    await echo.start(made.credentials(getattr(made, shown)) if shown else None)
    said = await why_not(echo.address, **as_client(made) if is_secure else {})
    assert words in said and SETTING in said


async def test_a_certificate_for_another_name(echo: Echo, made: Certificates) -> None:
    await echo.start(made.credentials(made.named))
    said = await why_not(echo.address, **as_client(made))
    assert "for another name" in said and "server_name" in said
    tls = as_client(made, server_name=SERVER_NAME)
    await talk(echo.address, await asyncio.to_thread(lambda: Tls(**tls)))


@pytest.mark.parametrize("shown", ["none", "a stranger's"])
async def test_a_server_that_asks_for_our_certificate(
    echo: Echo, made: Certificates, shown: str
) -> None:
    await echo.start(made.credentials(mutual=True))
    pair = None if shown == "none" else made.stranger
    said = await why_not(echo.address, **as_client(made, pair))
    assert "needs a certificate, or refuses ours" in said and SETTING in said


async def test_a_certificate_that_was_renewed_counts_from_the_next_connection_on(
    echo: Echo, made: Certificates, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    await asyncio.to_thread(ca.write_bytes, made.stranger.pem)
    tls = await asyncio.to_thread(lambda: Tls(ca=ca))
    await echo.start(made.credentials())
    with pytest.raises(CallEnded, match="not trusted"):
        await talk(echo.address, tls)
    await asyncio.to_thread(ca.write_bytes, made.ca.pem)
    await talk(echo.address, tls, bytes(range(256)) * 8192)
    await asyncio.to_thread(ca.unlink)
    with pytest.raises(CallEnded, match=f"ca: cannot use {ca}: No such file"):
        await talk(echo.address, tls)


# ── a Triton that is started with it ─────────────────────────────────────────────────────────


def serving_as(made: Certificates, pair: Pair, **more: Any) -> Tls:
    return Tls(certificate=pair.certificate, key=pair.key, **more)


def test_what_a_triton_shows_is_tried_before_it_starts() -> None:
    made = certificates()
    ca = made.ca.certificate
    serving_as(made, made.server, ca=ca).check_served("127.0.0.1")
    serving_as(made, made.server, ca=ca).check_served("localhost")
    serving_as(made, made.named, ca=ca, server_name=SERVER_NAME).check_served("10.0.0.7")
    for tls, host, said in (
        (Tls(ca=ca), "127.0.0.1", "needs a certificate and a key"),
        (serving_as(made, made.server, ca=ca), "10.0.0.7", "for another name"),
        (serving_as(made, made.named, ca=ca), "127.0.0.1", "for another name"),
        (serving_as(made, made.stranger, ca=ca), "127.0.0.1", "not trusted"),
        (serving_as(made, made.server), "127.0.0.1", "not trusted"),
    ):
        with pytest.raises(ValueError, match=said):
            tls.check_served(host)


@for_each("mutual", [False, True])
def test_triton_is_told_what_to_show_and_whether_to_ask(mutual: bool) -> None:
    made = certificates()
    tls = serving_as(made, made.server, ca=made.ca.certificate if mutual else None)
    install = TritonInstall(Path("/t/bin/tritonserver"), Path("/t/backends"), (), "0", "path")
    spec = TritonSpec(Path("/models"), ("llm",), tls=tls)
    command = triton_command(install, spec, TritonPorts(1, 2, 3), "id_")
    asked = {
        flag for flag in command if "grpc-use-ssl" in flag or "-cert" in flag or "-key=" in flag
    }
    shown = {
        f"--grpc-server-cert={made.server.certificate}",
        f"--grpc-server-key={made.server.key}",
    }
    if mutual:
        shown |= {"--grpc-use-ssl-mutual=1", f"--grpc-root-cert={made.ca.certificate}"}
    else:
        shown.add("--grpc-use-ssl=1")
    assert asked == shown


def test_a_pool_has_its_tritons_and_its_orchestrator_speak_it() -> None:
    made = certificates()
    text = '[orchestrator]\n[[instances]]\nname = "a"\nmodel = "demo"\n'
    table = f'[lanes.tls]\ncertificate = "{made.server.certificate}"\nkey = "{made.server.key}"\n'
    before, after = specs_of(parse_pool_file(text)), specs_of(parse_pool_file(table + text))
    triton, beside = after["a"], after["orchestrator"]
    assert isinstance(triton, InstanceSpec) and isinstance(beside, OrchestratorSpec)
    assert triton.tls == serving_as(made, made.server)
    assert stated_tls(beside.settings[SETTING]) == {
        "certificate": str(made.server.certificate),
        "key": str(made.server.key),
    }
    assert [before[name].digest == after[name].digest for name in after] == [False, False]
    with pytest.raises(PoolFileInvalid, match="certificate and key go together"):
        parse_pool_file(table.rpartition("key =")[0])
    with pytest.raises(PoolFileInvalid, match=r"pool\.toml: pool\.triton_tls: unknown key"):
        parse_pool_file(table.replace("lanes.tls", "pool.triton_tls"))
    with pytest.raises(PoolFileInvalid, match=r"lanes\.tls\.cert: unknown key"):
        parse_pool_file(table + 'cert = "x"\n')


def test_no_connection_to_triton_passes_by_the_settings_of_tls() -> None:
    """gRPC channels are opened in one module, and code that opens a call or a channel there hands
    over these settings."""
    root = Path(__file__).parents[2]
    opened = 0
    names = r"\b(?:insecure_channel|secure_channel|open_call|open_channel|InferenceServerClient)\b"
    for package in (
        "catalog",
        "clips",
        "orchestrator",
        "picker",
        "pool",
        "protocol",
        "worker",
        "client/tidegate",
    ):
        for source in (root / package).rglob("*.py"):
            text = source.read_text()
            for call in ast.walk(ast.parse(text)) if re.search(names, text) else ():
                if not isinstance(call, ast.Call):
                    continue
                name = call.func.attr if isinstance(call.func, ast.Attribute) else None
                name = call.func.id if isinstance(call.func, ast.Name) else name
                if name in ("insecure_channel", "secure_channel"):
                    assert source == root / "orchestrator/tls.py", source
                elif name in ("open_call", "open_channel"):
                    opened += 1
                    assert "tls" in ast.unparse(call), f"{source}:{call.lineno}"
                else:
                    assert name != "InferenceServerClient", source
    assert opened >= 5  # lanes, the plain lane, swaps, two of slots, the launcher's questions


# ── settings ─────────────────────────────────────────────────────────────────────────────────


def test_settings_come_as_a_table_or_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = certificates()
    expected = Tls(**as_client(made, made.client, server_name=SERVER_NAME))
    (tmp_path / "tidegate.toml").write_text(
        "[lanes.tls]\n"
        + "".join(f'{name} = "{value}"\n' for name, value in expected.model_dump().items())
    )
    assert load_settings().lanes.tls == expected
    monkeypatch.setenv(SETTING, json.dumps({"ca": str(made.ca.certificate)}))
    assert load_settings().lanes.tls == Tls(ca=made.ca.certificate)
    monkeypatch.setenv(SETTING, "{}")
    assert load_settings().lanes.tls == Tls()
    monkeypatch.setenv(SETTING, "")
    assert load_settings().lanes.tls is None


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"ca": "none.pem"}, "CA: cannot use none.pem: No such file or directory"),
        ({"certificate": "{server}"}, "certificate and key go together"),
        ({"certificate": "{server}", "key": "{other}"}, "key values mismatch"),
        ({"certificate": "{server}", "key": "{locked}"}, "with the key locked.key"),
        ({"server_name": "a b"}, "SERVER_NAME: String should match"),
        ({"cert": "x"}, "lanes.tls.cert: not a setting"),
        ("x.pem", 'expected JSON such as {"ca": "/path/ca.pem"}'),
    ],
)
def test_files_that_cannot_be_used_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: object, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    made = certificates()
    (tmp_path / "locked.key").write_bytes(made.server.locked_key())
    spelled = stated if isinstance(stated, str) else json.dumps(stated)
    spelled = spelled.replace("{server}", str(made.server.certificate))
    spelled = spelled.replace("{other}", str(made.client.key)).replace("{locked}", "locked.key")
    monkeypatch.setenv(SETTING, spelled)
    with pytest.raises(InvalidSettings) as error:
        load_settings()
    assert said in str(error.value)
