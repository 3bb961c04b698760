"""``tidegate doctor``: each lack is found, with what to do about it."""

import json
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pool.preflight import gpu, host
from pool.preflight.checkup import CheckupFinding, CheckupVerdict, examine
from tidegate.cli.main import main
from worker.extras import pip_install


def found(check: str, **wanted: Any) -> CheckupFinding:
    here = {"home": Path("/"), "device": "cpu", "port": 0} | wanted
    return next(finding for finding in examine(**here) if finding.check == check)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu, "look", lambda: gpu.UsableGpus(problem="no NVIDIA driver", advice="buy")
    )


def test_every_lack_has_an_advice(tmp_path: Path) -> None:
    findings = list(examine(tmp_path, port=0))
    assert len({finding.check for finding in findings}) == len(findings) == 13
    assert all(finding.advice for finding in findings if finding.verdict is not CheckupVerdict.OK)


@pytest.mark.parametrize(
    ("device", "verdict"),
    [("cuda", CheckupVerdict.FAIL), (None, CheckupVerdict.WARN), ("cpu", CheckupVerdict.OK)],
)
def test_a_gpu_is_missed_where_it_is_wanted(device: str | None, verdict: CheckupVerdict) -> None:
    assert found("gpu", device=device).verdict is verdict


@pytest.mark.parametrize(
    ("built_for", "verdict", "said"),
    [
        ("12.4", CheckupVerdict.OK, "for CUDA 12.4"),
        ("13.0", CheckupVerdict.FAIL, "needs CUDA 13.0, and the driver can do 12.6"),
        (None, CheckupVerdict.WARN, "built without CUDA, and there is a GPU"),
    ],
)
def test_torch_must_fit_the_driver(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, verdict: CheckupVerdict, said: str
) -> None:
    monkeypatch.setattr(gpu, "look", lambda: gpu.UsableGpus(("H100", "H100"), "12.6"))
    monkeypatch.setattr(gpu, "torch_cuda", lambda: built_for)
    assert found("gpu", device=None).found == "H100, H100; driver for CUDA 12.6"
    finding = found("torch", device=None)
    assert finding.verdict is verdict and said in finding.found


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert found("torch").verdict is CheckupVerdict.FAIL
    assert found("numba").advice == pip_install("cpu")
    assert found("numba").verdict is CheckupVerdict.WARN
    assert found("numba", device="cuda").verdict is CheckupVerdict.OK


def test_a_server_that_is_not_there_can_be_fetched_but_not_a_wrong_one(tmp_path: Path) -> None:
    assert found("triton", home=tmp_path).verdict is CheckupVerdict.WARN
    finding = found("triton", home=tmp_path, triton=tmp_path / "none")
    assert (
        finding.verdict is CheckupVerdict.FAIL
        and "expected the tritonserver binary" in finding.advice
    )


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finding = found("port", port=taken.getsockname()[1])
    assert finding.verdict is CheckupVerdict.WARN and "--port 0" in finding.advice


def test_what_the_cpu_can_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(host, "CPUINFO", cpuinfo)
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    assert found("cpu").verdict is CheckupVerdict.WARN  # nobody tells
    cpuinfo.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 avx512f amx_tile amx_bf16 avx512_bf16\n"
    )
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert found("cpu").found == "0.5 cores; AVX2, AVX-512, AVX-512 bf16, AMX, AMX bf16"


def test_the_command_says_all_and_its_status_sums_it_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    monkeypatch.setattr(host, "libpython_places", lambda: ["/"])
    argv = ["doctor", "--device", "cpu", "--port", "0"]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "FAIL  libpython" in out and "→ sudo apt-get" in out and "\x1b" not in out
    assert "to fix before it can serve." in out
    assert main([*argv, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["can_serve"] is False
    assert {f["verdict"] for f in report["findings"]} >= {"ok", "fail"}
