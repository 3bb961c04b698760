"""A server out of the wheel: laid out once, whole or not at all."""

from pathlib import Path

import pytest

from catalog.errors import FetchFailed, MachineUnfit
from pool.engines import triton_wheel as wheel
from pool.preflight import host as machine


def unpack(target: Path) -> None:
    """What pip makes of the wheel, as far as it matters."""
    server = target / "pytriton" / "tritonserver"
    stub = f"python_backend_stubs/{machine.python_version()}/triton_python_backend_stub"
    for name in (
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_utils.py",
        stub,
    ):
        (server / name).parent.mkdir(parents=True, exist_ok=True)
        (server / name).write_text(name)
        (server / name).chmod(0o644)


def test_lays_out_a_backend_for_this_python_once(tmp_path: Path) -> None:
    wheel.prepare(tmp_path, unpack)
    backend = wheel.backend_dir(tmp_path) / "python"
    assert len(list(backend.iterdir())) == 3
    server = wheel.server_dir(tmp_path) / "bin" / "tritonserver"
    for program in (backend / "triton_python_backend_stub", server):
        assert program.stat().st_mode & 0o111 == 0o111
    wheel.prepare(tmp_path, lambda target: pytest.fail("downloaded again"))


def test_an_interrupted_download_is_repeated(tmp_path: Path) -> None:
    def interrupted(target: Path) -> None:
        (target / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wheel.prepare(tmp_path, interrupted)
    assert not wheel.is_prepared(tmp_path)
    wheel.prepare(tmp_path, unpack)
    assert wheel.is_prepared(tmp_path)
    assert not (wheel.wheel_dir(tmp_path) / "half").exists()


def test_a_python_without_a_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "python_version", lambda: "3.99")
    with pytest.raises(MachineUnfit, match=r"no stub for Python 3\.99: use Python.*make clean"):
        wheel.prepare(tmp_path, unpack)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "pool" / "preflight" / "host.py"))
    with pytest.raises(MachineUnfit, match=r"or 3\.13 \(install Tidegate with python3\.11, in an"):
        wheel.prepare(tmp_path, unpack)


def test_two_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    def another(target: Path) -> None:
        with pytest.raises(FetchFailed, match="another process"):
            wheel.prepare(tmp_path, lambda target: pytest.fail("downloaded twice"))
        unpack(target)

    wheel.prepare(tmp_path, another)
    assert wheel.is_prepared(tmp_path)
