"""Triton as an engine of the catalog (PV-3)."""

import sys
from pathlib import Path

import pytest

from catalog.engines import EngineCatalog
from catalog.errors import EngineNotFound
from pool.engines.triton_provider import TritonProvider, docker_command
from tests.pool.engines.test_triton_fetch import UNPACKS, pip


def make_server(root: Path, content: bytes = b"server") -> Path:
    """Laid out as the NGC image has it."""
    for name in ("bin", "backends/python", "lib"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "bin" / "tritonserver").write_bytes(content)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    (root / "backends" / "python" / "triton_python_backend_stub").write_bytes(
        f"python{version}".encode()
    )
    (root / "TRITON_VERSION").write_text("2.60.0\n")
    return root


async def test_a_server_of_ones_own_is_registered_once_by_what_it_is(tmp_path: Path) -> None:
    root = make_server(tmp_path / "own")
    provider = TritonProvider(root)
    engine = await provider.ensure(tmp_path)
    assert (engine.name, engine.version, engine.build_ref) == ("triton", "2.60.0", f"path {root}")
    assert engine.binary == root / "bin" / "tritonserver"
    assert await provider.ensure(tmp_path) == engine
    assert [entry.id for entry in EngineCatalog(tmp_path).entries()] == [engine.catalog_id]
    make_server(root, b"another")
    other = await provider.ensure(tmp_path)
    assert other.catalog_id != engine.catalog_id
    assert EngineCatalog(tmp_path).get("triton").id in (engine.catalog_id, other.catalog_id)


async def test_where_there_is_none_the_wheel_is_fetched(tmp_path: Path) -> None:
    provider = TritonProvider(ngc_root=tmp_path / "none", pip=pip(UNPACKS))
    engine = await provider.ensure(tmp_path)
    assert engine.build_ref == "wheel nvidia-pytriton==0.7.0"
    (entry,) = EngineCatalog(tmp_path).entries()
    assert entry.artifacts == (str(tmp_path / "triton-0.7.0"),)


async def test_a_path_without_a_server_registers_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngineNotFound):
        await TritonProvider(tmp_path / "none").ensure(tmp_path)
    assert EngineCatalog(tmp_path).entries() == ()


def test_an_image_is_run_by_docker_on_loopback_with_the_model_read_only() -> None:
    command = docker_command("an/image:1", Path("/models/a"), gpus=True)
    assert command[:2] == ["docker", "run"] and command[-1] == "an/image:1"
    assert command[command.index("--publish") + 1] == "127.0.0.1:8001:8001"
    assert command[command.index("--volume") + 1] == "/models/a:/model:ro"
    assert "--gpus" in command and "--gpus" not in docker_command("i", Path("/m"), gpus=False)
