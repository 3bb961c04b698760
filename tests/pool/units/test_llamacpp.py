"""llama.cpp's server as a unit: what it is started with, what it refuses, what is left of it."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from catalog.errors import StartFailed
from orchestrator.lanes.endpoint import ServerKind, read_endpoint
from orchestrator.lanes.servers.cards import read_folder
from pool.process.http_get import get
from pool.process.ports import free_ports
from pool.units.llamacpp import LlamaCppServer
from tests.support.fake_llamacpp import install
from tests.support.gguf import write_gguf
from tests.worker.models.gguf.test_vocabulary import byte_level

Make = Callable[..., LlamaCppServer]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    metadata = byte_level() | {
        "general.architecture": "llama",
        "general.sampling.temp": 0.5,
        "llama.context_length": 300,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return write_gguf(tmp_path / "tiny-Q4.gguf", metadata)


@pytest.fixture
async def make(tmp_path: Path, model: Path) -> AsyncIterator[Make]:
    install(tmp_path)
    made: list[LlamaCppServer] = []

    def unit(home: Path = tmp_path, **settings: str) -> LlamaCppServer:
        told = {"model_path": str(model), "device": "cpu", "engine": "llamacpp"} | settings
        variables = {f"TIDEGATE_WORKER__{name.upper()}": value for name, value in told.items()}
        log = tmp_path / "llamacpp.log"
        port = free_ports(1)[0]
        made.append(LlamaCppServer("llamacpp", variables, home, port, log=log))
        return made[-1]

    yield unit
    for each in made:
        await each.stop(0.0)


async def told(server: LlamaCppServer) -> dict[str, object]:
    _, body = await get("127.0.0.1", server.port, "/props")
    return json.loads(body)  # type: ignore[no-any-return]


async def test_it_serves_with_what_orchestrators_need_of_its_file(make: Make) -> None:
    server = make()
    await server.start()
    endpoint = read_endpoint(server.address)
    assert endpoint.kind is ServerKind.LLAMACPP
    assert endpoint.base_url == f"http://127.0.0.1:{server.port}"
    assert endpoint.alias == "tiny-Q4"
    folder = read_folder(endpoint.tokenizer)
    assert (folder.context_tokens, folder.eos_token_ids) == (300, (1,))
    assert folder.chat_template == "{{ messages }}"
    assert folder.sampling_defaults.temperature == 0.5
    params = await told(server)
    wanted = {"path": "tiny-Q4.gguf", "hostnames": ["127.0.0.1"], "n_gpu_layers": 0, "ui": False}
    assert params.items() >= wanted.items()
    assert (params["n_parallel"], params["n_ctx"], params["threads"]) == (4, 1200, -1)
    assert server.describe() == {"name": "llamacpp", "http_port": server.port, "pid": server.pid}


async def test_settings_are_its_own_by_their_names(make: Make, tmp_path: Path) -> None:
    args = f"n_ctx=512 n_threads=3 kv_unified=true rope_freq_base=1e4 tokenizer={tmp_path}"
    server = make(max_running="2", engine_args=args, model_name="mine")
    await server.start()
    params = await told(server)
    assert (params["n_parallel"], params["n_ctx"], params["threads"]) == (2, 512, 3)
    assert (params["kv_unified"], params["rope_freq_base"]) == (True, 1e4)
    endpoint = read_endpoint(server.address)
    assert (endpoint.alias, endpoint.tokenizer) == ("mine", tmp_path)
    assert not (tmp_path / "gguf").exists(), "the vocabulary is somebody else's"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"deterministic": "true", "dtype": "float32"},
            "DETERMINISTIC, TIDEGATE_WORKER__DTYPE: not",
        ),
        ({"engine_args": "n_ctxx=1"}, "n_ctxx: llama.cpp's server has no number"),
        ({"engine_args": "kv_unified=maybe"}, "kv_unified=maybe: expected a value such as False"),
        ({"device": "cuda"}, "device 'cuda' cannot be used: this llama.cpp has no GPU"),
        ({"model_path": "/nothing.gguf"}, "/nothing.gguf does not exist"),
    ],
)
async def test_what_does_not_fit_stops_the_start_by_name(
    make: Make, settings: dict[str, str], problem: str
) -> None:
    with pytest.raises(StartFailed, match=problem):
        await make(**settings).start()


async def test_what_cannot_be_read_or_is_not_installed_names_the_remedy(
    make: Make, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(StartFailed, match="not installed here: tidegate engines ensure llamacpp"):
        await make(home=tmp_path / "other").start()
    write_gguf(model, byte_level() | {"general.architecture": "x", "tokenizer.ggml.pre": "tekken"})
    with pytest.raises(StartFailed, match=r"pre='tekken'\) is not known.*tokenizer=FOLDER"):
        await make().start()


async def test_one_that_dies_is_noticed_and_starts_again_at_its_port(make: Make) -> None:
    server = make()
    await server.start()
    address, pid = server.address, server.pid
    assert pid is not None
    lost = asyncio.create_task(server.lost())
    os.kill(pid, signal.SIGKILL)
    assert await lost == "it ended with status 137"
    await server.stop(0.0)
    await server.start()
    assert server.address == address
    await server.stop(1.0)
    await server.stop(1.0)
    assert server.pid is None
