"""What a machine can build with, and what may be installed for that (PV-3, PV-6)."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from catalog.errors import MachineUnfit
from pool.engines import system_packages, toolchain


def make_tool(folder: Path, name: str, says: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / name).chmod(0o755)


def test_what_was_found_is_kept_until_it_is_old_or_path_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tool(tmp_path / "bin", "ccache", "ccache version 4.8")
    make_tool(tmp_path / "bin", "nvcc", "Cuda compilation tools, release 12.4, V12.4.131")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    found = toolchain.toolchain(tmp_path)
    assert (found.tools["ccache"].version, found.tools["nvcc"].version) == ("4.8", "12.4")
    assert found.ccache == str(tmp_path / "bin" / "ccache")

    looked = []
    real = toolchain.look
    monkeypatch.setattr(toolchain, "look", lambda: looked.append(1) or real())
    assert toolchain.toolchain(tmp_path) == found and not looked
    toolchain.toolchain(tmp_path, ttl_s=0.0)
    toolchain.toolchain(tmp_path, refresh=True)
    assert len(looked) == 2
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    assert toolchain.toolchain(tmp_path).path_digest != found.path_digest
    assert len(looked) == 3
    (tmp_path / "engines" / "toolchain.json").write_bytes(b"{")
    toolchain.toolchain(tmp_path)
    assert len(looked) == 4


class Machine:
    """A machine with a package manager, which brings the tools that its packages are called."""

    def __init__(self, manager: str | None, fails: bool = False) -> None:
        self.there = {manager}
        self.ran: list[list[str]] = []
        self._fails = fails

    def which(self, name: str) -> str | None:
        return f"/bin/{name}" if name in self.there else None

    def run(self, command: Sequence[str]) -> int:
        self.ran.append(list(command))
        self.there |= {"cmake", "c++"}
        return int(self._fails)


@pytest.mark.parametrize(
    ("manager", "said"),
    [("apt-get", "apt-get install -y g\\+\\+ cmake"), ("dnf", "dnf install -y gcc-c\\+\\+ cmake")],
)
def test_system_packages_are_shown_and_not_installed_unless_that_is_allowed(
    manager: str, said: str
) -> None:
    machine = Machine(manager)
    tools = ("c++", "cmake")
    with pytest.raises(MachineUnfit, match=f"{said} brings it; --allow-system-packages"):
        system_packages.require_tools(tools, allowed=False, which=machine.which, run=machine.run)
    assert machine.ran == []
    system_packages.require_tools(tools, allowed=True, which=machine.which, run=machine.run)
    assert [command[-4:-2] for command in machine.ran] == [["install", "-y"]]
    system_packages.require_tools(tools, allowed=True, which=machine.which, run=machine.run)
    assert len(machine.ran) == 1


def test_an_installation_that_fails_is_said() -> None:
    machine = Machine("apt-get", fails=True)
    with pytest.raises(MachineUnfit, match="cmake failed"):
        system_packages.require_tools(["cmake"], allowed=True, which=machine.which, run=machine.run)


def test_a_machine_without_a_package_manager_is_said() -> None:
    machine = Machine(None)
    with pytest.raises(MachineUnfit, match="neither apt-get nor dnf"):
        system_packages.require_tools(["cmake"], allowed=True, which=machine.which, run=machine.run)


def test_a_tool_that_speaks_another_encoding_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tool(tmp_path / "bin", "ccache", "")
    (tmp_path / "bin" / "ccache").write_bytes(b"#!/bin/sh\nprintf 'ccache \\351 4.8\\n'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert toolchain.look().tools["ccache"].version == "4.8"
