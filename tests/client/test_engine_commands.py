"""``tidegate engines``, on this machine's catalog."""

import json
from pathlib import Path

import pytest

from catalog.engine_entry import EngineEntry
from catalog.engines import EngineCatalog
from pool.spec import LaunchSpec
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


def test_the_toolchain_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["engines", "toolchain"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "gpus",
        "driver",
    ]


def test_up_runs_an_engine_in_the_environment_that_was_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[LaunchSpec]
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    assert main(["up", "--engine", "vllm"]) == 0
    assert "VIRTUAL_ENV" not in launched[0].worker_env
    python = tmp_path / "engines" / "vllm-1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    EngineCatalog(tmp_path).put(
        EngineEntry(
            id="vllm-1",
            engine="vllm",
            version="1",
            build_ref="pip x",
            created_ms=1,
            binary=str(python),
        )
    )
    assert main(["up", "--engine", "vllm"]) == 0
    assert launched[1].worker_env["VIRTUAL_ENV"] == str(python.parents[1])
    assert launched[1].worker_env["PATH"].startswith(f"{python.parent}:")
