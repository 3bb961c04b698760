"""Triton as an engine of the catalog: found, or fetched from the wheel (PV-3)."""

import asyncio
import sys
from pathlib import Path

import pytest

from catalog.engines import EngineCatalog
from catalog.errors import EngineNotFound, FetchFailed
from pool.engines import triton_wheel as wheel
from pool.engines.ensure import ensure_engine, ensure_triton, fetch_triton, registered
from tests.support.processes import Marked, eventually

UNPACKS = """
import os, sys
from pathlib import Path
from tests.pool.engines.test_triton_wheel import unpack

unpack(Path(sys.argv[sys.argv.index("--target") + 1]))
(Path(os.environ["TMPDIR"]) / "unpacked").touch()
"""


def pip(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def make_server(root: Path, content: bytes = b"server") -> Path:
    """Laid out as the NGC image has it."""
    for name in ("bin", "backends/python", "lib"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "bin" / "tritonserver").write_bytes(content)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "backends" / "python" / "triton_python_backend_stub"
    stub.write_bytes(f"python{version}".encode())
    (root / "TRITON_VERSION").write_text("2.60.0\n")
    return root


async def test_a_server_of_ones_own_is_registered_once_by_what_it_is(tmp_path: Path) -> None:
    root = make_server(tmp_path / "own")
    engine = await ensure_engine("triton", tmp_path, triton=root)
    assert (engine.name, engine.version, engine.build_ref) == ("triton", "2.60.0", f"path {root}")
    assert engine.binary == root / "bin" / "tritonserver"
    assert await ensure_engine("triton", tmp_path, triton=root) == engine
    assert [entry.id for entry in EngineCatalog(tmp_path).entries()] == [engine.catalog_id]
    make_server(root, b"another")
    other = await ensure_engine("triton", tmp_path, triton=root)
    assert other.catalog_id != engine.catalog_id
    assert EngineCatalog(tmp_path).get("triton").id in (engine.catalog_id, other.catalog_id)
    with pytest.raises(EngineNotFound):
        await ensure_engine("triton", tmp_path, triton=tmp_path / "none")
    assert len(EngineCatalog(tmp_path).entries()) == 2, "nothing was registered"


async def test_where_there_is_none_the_wheel_is_fetched_once(tmp_path: Path) -> None:
    said: list[str] = []
    nowhere = tmp_path / "none"
    install = await ensure_triton(None, tmp_path, said.append, ngc_root=nowhere, pip=pip(UNPACKS))
    assert (tmp_path / "unpacked").exists(), "pip unpacks on the volume: /tmp may be memory"
    assert wheel.is_prepared(tmp_path) and "none on this machine; fetching" in said[0]
    engine = registered(tmp_path, install)
    assert engine.build_ref == "wheel nvidia-pytriton==0.7.0"
    (entry,) = EngineCatalog(tmp_path).entries()
    assert entry.artifacts == (str(tmp_path / "triton-0.7.0"),)
    await fetch_triton(tmp_path, pip("raise SystemExit('fetched again')"))


async def test_pips_last_words_are_shown(tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match=r"(?s)no such index.*PIP_INDEX_URL.*--triton PATH"):
        await fetch_triton(tmp_path, pip("raise SystemExit('no such index')"))
    assert not wheel.is_downloaded(tmp_path)


async def test_a_cancelled_fetch_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = Marked()
    for name, value in marked.mark.items():
        monkeypatch.setenv(name, value)
    ready = tmp_path / "ready"
    waits = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"
    fetching = asyncio.create_task(fetch_triton(tmp_path, pip(waits)))
    await asyncio.to_thread(eventually, ready.exists, lambda: "pip did not start")
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    marked.wait_gone(set())
    assert not wheel.is_downloaded(tmp_path) and not list(tmp_path.glob("*.partial"))  # noqa: ASYNC240
