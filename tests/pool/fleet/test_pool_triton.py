"""What a pool's Triton is started with, and where (PV-1, PV-2)."""

import asyncio
import socket
from pathlib import Path

import pytest

from catalog.errors import PortInUse
from pool.engines.triton import TritonInstall, TritonPorts
from pool.fleet.gpus import Gpus
from pool.fleet.home import PoolHome
from pool.fleet.specs import CHOSEN, InstanceSpec
from pool.fleet.triton import PoolTriton, TritonHost, former
from pool.process.detached import Found, Label
from pool.process.ports import free_ports
from pool.process.proc import ProcessId
from tests.support.fake_gpus import FakeGpus


def on_step(step: str) -> None:
    pass


SETTINGS = {"TIDEGATE_WORKER__ENGINE": "torch"}


def host(tmp_path: Path, advertise: str = "") -> TritonHost:
    now = asyncio.get_running_loop().time
    install = TritonInstall(Path("/none"), Path("/none"), (), "0", "path")
    return TritonHost(
        home=PoolHome(tmp_path),
        state_dir=tmp_path,
        install=install,
        lane_token="secret",
        gpus=Gpus(FakeGpus(40.0, 40.0), 15.0, now, lambda uuid, why: None),
        sharing=lambda: 3,
        heartbeat_s=15.0,
        warn=lambda text: None,
        advertise=advertise,
    )


def unit(tmp_path: Path, spec: InstanceSpec, kept: TritonPorts = CHOSEN) -> PoolTriton:
    return PoolTriton(host(tmp_path), spec, kept, on_step)


async def test_gpus_are_named_by_uuid_since_cuda_may_count_otherwise(tmp_path: Path) -> None:
    made = unit(tmp_path, InstanceSpec("a", "demo", (("1",),), SETTINGS))
    made._group = ("1",)
    env = await made._env(Path("/model"))
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("GPU-1", "PCI_BUS_ID")
    assert "TIDEGATE_SHARED_BY" not in env, "each has a GPU of its own"


async def test_over_a_group_of_gpus_the_model_is_split(tmp_path: Path) -> None:
    group = ("0", "1")
    for engine in ("auto", "vllm"):
        settings = {"TIDEGATE_WORKER__ENGINE": engine, "TIDEGATE_WORKER__DEVICE": "cuda"}
        made = unit(tmp_path, InstanceSpec("a", "demo", (group,), settings))
        made._group = group
        env = await made._env(Path("/model"))
        assert env["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
        assert env["TIDEGATE_WORKER__TENSOR_PARALLEL"] == "2"
    stated = settings | {"TIDEGATE_WORKER__ENGINE": "vllm", "TIDEGATE_WORKER__TENSOR_PARALLEL": "1"}
    made = unit(tmp_path, InstanceSpec("a", "demo", (group,), stated))
    made._group = group
    assert (await made._env(Path("/model")))["TIDEGATE_WORKER__TENSOR_PARALLEL"] == "1"


async def test_on_the_cpu_it_is_told_how_many_share_the_memory(tmp_path: Path) -> None:
    env = await unit(tmp_path, InstanceSpec("a", "demo", settings=SETTINGS))._env(Path("/model"))
    assert env["TIDEGATE_SHARED_BY"] == "3"
    assert env["TIDEGATE_WORKER__MODEL_NAME"] == "demo"
    named = InstanceSpec("a", "demo", settings=SETTINGS | {"TIDEGATE_WORKER__MODEL_NAME": "mine"})
    assert (await unit(tmp_path, named)._env(Path("/m")))["TIDEGATE_WORKER__MODEL_NAME"] == "mine"


async def test_chosen_ports_are_kept_unless_somebody_has_them(tmp_path: Path) -> None:
    kept = TritonPorts(*free_ports(3))
    made = unit(tmp_path, InstanceSpec("a", "demo"), kept)
    assert made._choose_ports() == kept
    with socket.socket() as other:
        other.bind(("127.0.0.1", kept.grpc))
        other.listen()
        again = made._choose_ports()
    assert (again.http, again.metrics) == (kept.http, kept.metrics)
    assert again.grpc not in (kept.grpc, 0)


async def test_a_fixed_port_that_somebody_has_is_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        made = unit(tmp_path, InstanceSpec("a", "demo", ports=TritonPorts(0, taken, 0)))
        with pytest.raises(PortInUse, match=f"127.0.0.1:{taken}: .*in use; .* give a another port"):
            made._choose_ports()


async def test_orchestrators_are_told_the_name_by_which_they_reach_it(tmp_path: Path) -> None:
    ports = TritonPorts(1, 2, 3)
    spec = InstanceSpec("a", "demo", host="0.0.0.0")
    assert unit(tmp_path, spec, ports).address == "127.0.0.1:2"
    named = PoolTriton(host(tmp_path, "gpu7.example"), spec, ports, on_step)
    assert named.address == "gpu7.example:2"
    assert unit(tmp_path, spec).address == "", "no port yet"


async def test_one_that_is_not_asked_for_any_more_is_known_by_its_label(tmp_path: Path) -> None:
    facts = {"host": "10.1.2.3", "models": "llm,slot", "ports": "1,2,3"}
    found = Found(ProcessId(1, 1), Label(str(tmp_path), "old", "mark", facts))
    made = former(found, host(tmp_path), on_step)
    assert (made.name, made._spec.host, made._spec.models) == ("old", "10.1.2.3", ("llm", "slot"))
