"""What may be installed for a build (PV-3, PV-6)."""

from collections.abc import Sequence

import pytest

from catalog.errors import MachineUnfit
from pool.engines.recipes import require_tools
from tests.support.cases import for_each


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


@for_each(
    ("manager", "said"),
    [("apt-get", "apt-get install -y g\\+\\+ cmake"), ("dnf", "dnf install -y gcc-c\\+\\+ cmake")],
)
def test_system_packages_are_shown_and_not_installed_unless_that_is_allowed(
    manager: str, said: str
) -> None:
    machine = Machine(manager)
    tools = ("c++", "cmake")
    with pytest.raises(MachineUnfit, match=f"{said}, or let --allow-system-packages"):
        require_tools(tools, allowed=False, which=machine.which, run=machine.run)
    assert machine.ran == []
    require_tools(tools, allowed=True, which=machine.which, run=machine.run)
    assert [command[-4:-2] for command in machine.ran] == [["install", "-y"]]
    require_tools(tools, allowed=True, which=machine.which, run=machine.run)
    assert len(machine.ran) == 1


@for_each(
    ("machine", "said"),
    [(Machine("apt-get", fails=True), "cmake failed"), (Machine(None), "neither apt-get nor dnf")],
)
def test_what_cannot_be_installed_is_said(machine: Machine, said: str) -> None:
    with pytest.raises(MachineUnfit, match=said):
        require_tools(["cmake"], allowed=True, which=machine.which, run=machine.run)
