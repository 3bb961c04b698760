"""``tidegate engines``, on this machine's catalog."""

import json
from pathlib import Path

import pytest

from tests.client.conftest import Cli
from tests.pool.engines.test_ensure import make_server


def test_an_engine_is_ensured_listed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COLUMNS", raising=False)
    root = make_server(tmp_path / "own")
    entry = json.loads(cli("engines", "ensure", "triton", "--triton", str(root), "--json").out)
    assert (entry["engine"], entry["version"]) == ("triton", "2.60.0")
    assert entry["build_ref"] == f"path {root}"
    header, line = cli("engines", "list").out.splitlines()
    assert header.split()[:3] == ["ENGINE", "VERSION", "DEVICE"]
    assert line.split()[:2] == ["triton", "2.60.0"] and line.endswith(entry["id"])
    assert entry["digest"] in cli("engines", "show", "triton").out
    assert cli("engines", "verify").out == f"{entry['id']}: no file has changed\n"
    (root / "bin" / "tritonserver").write_bytes(b"other")
    said = cli("engines", "verify", "triton", status=1).out
    assert "its server, its Python backend or its stub has changed" in said
    said = cli("engines", "show", "vllm", status=1).err
    assert "tidegate engines ensure ENGINE installs one" in said
