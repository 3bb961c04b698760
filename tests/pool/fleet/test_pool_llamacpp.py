"""Which instances of a pool are llama.cpp's servers, and at which ports."""

import socket
from pathlib import Path

import pytest

from catalog.errors import PortInUse
from pool.engines.triton import TritonPorts
from pool.fleet.llamacpp import PoolLlamaCpp
from pool.fleet.machine import PoolMachine
from pool.fleet.specs import CHOSEN, InstanceSpec
from pool.fleet.triton import PoolTriton
from pool.pool_file import read_pool_file
from pool.process.detached import Found, Label
from pool.process.ports import free_ports
from pool.process.proc import ProcessId
from tests.pool.fleet.test_pool_triton import host, on_step

ENGINE = "TIDEGATE_WORKER__ENGINE"


def unit(tmp_path: Path, ports: TritonPorts = CHOSEN) -> PoolLlamaCpp:
    spec = InstanceSpec("a", str(tmp_path / "m.gguf"), ports=ports)
    return PoolLlamaCpp(host(tmp_path), spec, tmp_path / "m.gguf", 0, on_step)


async def test_a_gguf_file_gets_its_server_unless_another_engine_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    machine = PoolMachine(host(tmp_path))
    for model, engine, expected in (
        ("m.gguf", "auto", PoolLlamaCpp),
        ("m.gguf", "llamacpp", PoolLlamaCpp),
        ("m.gguf", "torch", PoolTriton),
        ("nothing.gguf", "auto", PoolTriton),
    ):
        spec = InstanceSpec("a", str(tmp_path / model), settings={ENGINE: engine})
        assert type(machine.make(spec, None, on_step)) is expected
    assert type(machine.make(InstanceSpec("a", "demo"), None, on_step)) is PoolTriton


async def test_one_that_is_not_asked_for_any_more_is_known_by_its_label(tmp_path: Path) -> None:
    facts = unit(tmp_path)._facts()
    found = Found(ProcessId(1, 1), Label(str(tmp_path), "old", "mark", facts))
    former = PoolMachine(host(tmp_path)).make_former(found, on_step)
    assert isinstance(former, PoolLlamaCpp)
    assert (former.name, former.address) == ("old", ""), "orchestrators are told of none"


async def test_its_port_is_the_one_for_http(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    assert unit(tmp_path, TritonPorts(port, 0, 0))._choose_port() == port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}: .* give a another port"):
            unit(tmp_path, TritonPorts(port, 0, 0))._choose_port()


def test_the_file_takes_its_name_and_refuses_one_that_is_gone(tmp_path: Path) -> None:
    text = '[[instances]]\nname = "a"\nmodel = "m.gguf"\ndevices = "cpu"\nengine = "{}"\n'
    path = tmp_path / "pool.toml"
    path.write_text(text.format("llamacpp"))
    assert read_pool_file(path).instances[0].engine == "llamacpp"
    path.write_text(text.format("transformers"))
    with pytest.raises(ValueError, match=r"'transformers'.*this engine is gone: take vllm"):
        read_pool_file(path)
