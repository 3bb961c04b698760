"""What the units of a pool are started with, and where (PV-1, PV-2)."""

import asyncio
import socket
from pathlib import Path

import pytest

from catalog.engines import EngineCatalog, EngineEntry
from catalog.errors import PortInUse
from pool.engines.triton import TritonInstall, TritonPorts
from pool.fleet.gpus import Gpus
from pool.fleet.specs import CHOSEN, InstanceSpec
from pool.fleet.units import PoolLlamaCpp, PoolMachine, PoolTriton, Tenancy
from pool.process.ports import free_ports
from pool.process.proc import ProcessId
from pool.process.process import FoundRun, Label
from tests.support.fake_gpus import FakeGpus

ENGINE, DEVICE = "TIDEGATE_WORKER__ENGINE", "TIDEGATE_WORKER__DEVICE"
SPLIT, NAME = "TIDEGATE_WORKER__TENSOR_PARALLEL", "TIDEGATE_WORKER__MODEL_NAME"
TORCH = {ENGINE: "torch"}


def on_step(step: str) -> None:
    pass


def host(tmp_path: Path, advertise: str = "") -> PoolMachine:
    return PoolMachine(
        install=TritonInstall(Path("/none"), Path("/none"), (), "0", "path"),
        state_dir=tmp_path,
        logs=tmp_path,
        lane_token="secret",
        warn=lambda text: None,
        home=tmp_path,
        gpus=Gpus(FakeGpus(40.0, 40.0), 15.0, asyncio.get_running_loop().time),
        sharing=lambda: 3,
        advertise=advertise,
    )


def triton(tmp_path: Path, spec: InstanceSpec, ports: TritonPorts = CHOSEN) -> PoolTriton:
    return PoolTriton(Tenancy(host(tmp_path), spec, on_step), ports)


async def env(tmp_path: Path, *group: str, **settings: str) -> dict[str, str]:
    made = triton(tmp_path, InstanceSpec("a", "demo", (group,), settings))
    made._tenancy.group = group
    return await made._env(settings)


async def test_gpus_are_named_by_uuid_and_a_group_splits_the_model(tmp_path: Path) -> None:
    one = await env(tmp_path, "1", **TORCH)
    assert (one["CUDA_VISIBLE_DEVICES"], one["CUDA_DEVICE_ORDER"]) == ("GPU-1", "PCI_BUS_ID")
    assert "TIDEGATE_SHARED_BY" not in one, "each has a GPU of its own"
    for engine in ("auto", "vllm"):
        two = await env(tmp_path, "0", "1", **{ENGINE: engine, DEVICE: "cuda"})
        assert (two["CUDA_VISIBLE_DEVICES"], two[SPLIT]) == ("GPU-0,GPU-1", "2")
    assert (await env(tmp_path, "0", "1", **{ENGINE: "vllm", SPLIT: "1"}))[SPLIT] == "1"


async def test_an_engine_runs_in_the_environment_that_was_made_for_it(tmp_path: Path) -> None:
    python = tmp_path / "engines" / "vllm-1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    entry = EngineEntry(
        id="vllm-1", engine="vllm", version="1", build_ref="x", created_ms=1, binary=str(python)
    )
    EngineCatalog(tmp_path).put(entry)
    assert "VIRTUAL_ENV" not in await env(tmp_path, **TORCH)
    told = await env(tmp_path, **{ENGINE: "vllm", "TIDEGATE_WORKER__MODEL_PATH": "/model"})
    assert told["VIRTUAL_ENV"] == str(python.parents[1])
    assert told["PATH"].startswith(f"{python.parent}:")


async def test_on_the_cpu_it_is_told_how_many_share_the_memory(tmp_path: Path) -> None:
    told = await env(tmp_path, **TORCH)
    assert (told["TIDEGATE_SHARED_BY"], told[NAME]) == ("3", "demo")
    assert (await env(tmp_path, **TORCH, **{NAME: "mine"}))[NAME] == "mine"


async def test_chosen_ports_are_kept_and_asked_for_ones_are_never_replaced(tmp_path: Path) -> None:
    kept = TritonPorts(*free_ports(3))
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        tenancy = Tenancy(host(tmp_path), InstanceSpec("a", "demo"), on_step)
        assert tenancy.ports("127.0.0.1", CHOSEN, kept) == [*kept]
        http, grpc, metrics = tenancy.ports("127.0.0.1", CHOSEN, (kept.http, taken, kept.metrics))
        assert (http, metrics) == (kept.http, kept.metrics) and grpc not in (taken, 0)
        with pytest.raises(PortInUse, match=f"127.0.0.1:{taken}: .*in use; .* give a another port"):
            tenancy.ports("127.0.0.1", (0, taken, 0), CHOSEN)


async def test_orchestrators_are_told_the_name_by_which_they_reach_it(tmp_path: Path) -> None:
    ports, spec = TritonPorts(1, 2, 3), InstanceSpec("a", "demo", host="0.0.0.0")
    assert triton(tmp_path, spec, ports).address == "127.0.0.1:2"
    named = PoolTriton(Tenancy(host(tmp_path, "gpu7.example"), spec, on_step), ports)
    assert named.address == "gpu7.example:2"
    assert triton(tmp_path, spec).address == "", "no port yet"


async def test_one_that_is_not_asked_for_any_more_is_known_by_its_label(tmp_path: Path) -> None:
    machine = host(tmp_path)

    def found(facts: dict[str, str]) -> FoundRun:
        return FoundRun(ProcessId(1, 1), Label("old", "mark", str(tmp_path), facts))

    facts = triton(tmp_path, InstanceSpec("a", "demo", host="10.1.2.3"), TritonPorts(1, 2, 3))
    old = machine.make_former(found(facts.facts()), on_step)
    assert isinstance(old, PoolTriton)
    assert (old.name, old._spec.host, old._spec.models) == ("old", "10.1.2.3", ("llm",))
    (tmp_path / "m.gguf").touch()
    server = machine.make(InstanceSpec("a", str(tmp_path / "m.gguf")), None, on_step)
    assert isinstance(server, PoolLlamaCpp)
    former = machine.make_former(found(server.facts()), on_step)
    assert isinstance(former, PoolLlamaCpp)
    assert (former.name, former.address) == ("old", ""), "orchestrators are told of none"


@pytest.mark.parametrize(
    ("model", "engine", "kind"),
    [
        ("m.gguf", "auto", PoolLlamaCpp),
        ("m.gguf", "llamacpp", PoolLlamaCpp),
        ("m.gguf", "torch", PoolTriton),
        ("nothing.gguf", "auto", PoolTriton),
        ("", "auto", PoolTriton),
    ],
)
async def test_a_gguf_file_gets_its_server_unless_another_engine_is_named(
    tmp_path: Path, model: str, engine: str, kind: type
) -> None:
    (tmp_path / "m.gguf").touch()
    spec = InstanceSpec("a", str(tmp_path / model) if model else "demo", settings={ENGINE: engine})
    made = host(tmp_path).make(spec, None, on_step)
    assert type(made) is kind
    if kind is PoolLlamaCpp:
        assert made.address == "", "no port yet"
