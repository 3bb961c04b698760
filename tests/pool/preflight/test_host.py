"""What the machine lacks is one sentence with the command that fixes it."""

import os
import platform
import sys
import sysconfig
from pathlib import Path

import pytest

from catalog.errors import MachineUnfit
from pool.preflight import host as machine

HERE = machine.python_version()


def stub(tmp_path: Path, needs: str) -> Path:
    path = tmp_path / "triton_python_backend_stub"
    path.write_bytes(b"\x7fELF\0libstdc++.so.6\0" + needs.encode() + b"\0")
    return path


@pytest.mark.parametrize(
    ("changed", "value", "said"),
    [
        ("machine", "aarch64", r"Linux on x86_64, and this is Linux on aarch64.*use"),
        ("confstr", "glibc 2.31", r"glibc 2\.35 or newer.* has 2\.31: use Debian 12"),
        ("confstr", "", r"glibc 2\.35 or newer.* has none: use Debian 12"),
    ],
)
def test_a_machine_that_cannot_run_the_wheel(
    monkeypatch: pytest.MonkeyPatch, changed: str, value: str, said: str
) -> None:
    monkeypatch.setattr(platform if changed == "machine" else os, changed, lambda *_: value)
    with pytest.raises(MachineUnfit, match=said):
        machine.check_platform()


def test_no_libpython(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(machine, "_SYSTEM_LIBRARIES", ())
    name = f"libpython{HERE}.so.1.0"
    with pytest.raises(MachineUnfit, match=rf"needs {name}.*apt-get install libpython{HERE} "):
        machine.libpython_dir(stub(tmp_path, needs=name))


def test_libpython_is_found_where_python_says_or_comes_with_the_stub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"libpython{HERE}.so.1.0"
    (tmp_path / name).touch()
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    assert machine.libpython_dir(stub(tmp_path, needs=name)) == tmp_path
    assert machine.libpython_dir(stub(tmp_path, needs="libpython3-419a3a08.13.so.1.0")) is None


def test_a_stub_of_another_python_says_what_to_do_in_a_checkout_and_in_an_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = stub(tmp_path, needs="libpython3.10.so.1.0")
    with pytest.raises(MachineUnfit, match=rf"runs Python 3\.10, and this is {HERE}: make clean"):
        machine.check_stub_python(other)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "pool" / "preflight" / "host.py"))
    with pytest.raises(MachineUnfit, match="in an image by a base"):
        machine.check_stub_python(other)
