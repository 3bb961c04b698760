"""``tidegate engines``, on this machine's catalog."""

import json
from pathlib import Path

import pytest

from tests.pool.engines.test_ensure import make_server
from tidegate.cli.main import main


def test_an_engine_is_ensured_listed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COLUMNS", raising=False)
    root = make_server(tmp_path / "own")
    assert main(["engines", "ensure", "triton", "--triton", str(root), "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert (entry["engine"], entry["version"]) == ("triton", "2.60.0")
    assert entry["build_ref"] == f"path {root}"
    assert main(["engines", "list"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["ENGINE", "VERSION", "DEVICE"]
    assert line.split()[:2] == ["triton", "2.60.0"] and line.endswith(entry["id"])
    assert main(["engines", "show", "triton"]) == 0
    assert entry["digest"] in capsys.readouterr().out
    assert main(["engines", "verify"]) == 0
    assert capsys.readouterr().out == f"{entry['id']}: every file is as it was\n"
    (root / "bin" / "tritonserver").write_bytes(b"other")
    assert main(["engines", "verify", "triton"]) == 1
    assert "its server, its Python backend or its stub has changed" in capsys.readouterr().out
    assert main(["engines", "show", "vllm"]) == 1
    assert "tidegate engines ensure vllm gets one" in capsys.readouterr().err
