"""Set-up: what runs when, and that a second run does nothing."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from catalog.paths import ROOT
from pool import bootstrap
from pool.engines import triton_wheel as wheel
from pool.preflight import host as machine
from tests.pool.engines.test_triton_wheel import unpack
from tests.support.processes import python


class Commands(list[list[str]]):
    """What set-up would have run, in a checkout of its own."""

    def set_up(self, *arguments: str) -> int:
        """Run set-up with these arguments."""
        sys.argv = ["bootstrap", *arguments]  # as of monkeypatch, which has it back
        return bootstrap.main()

    fails: Callable[[list[str]], bool] = staticmethod(lambda command: False)

    def run(self, command: list[str], what_failed: str) -> None:
        if self.fails(command):
            raise bootstrap.PipFailed(what_failed)
        self.append(command)
        if "--target" in command:
            unpack(Path(command[command.index("--target") + 1]))

    @property
    def installed(self) -> list[str]:
        """What pip was asked for: the last words of each call, URLs aside."""
        pip = [command for command in self if "pip" in command]
        return [next(w for w in reversed(c) if not w.startswith(("-", "http"))) for c in pip]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands()
    (tmp_path / ".venv").mkdir()
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "VENV_PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(bootstrap, "NGC_ROOT", tmp_path / "ngc")
    monkeypatch.setattr(bootstrap, "_run", commands.run)
    monkeypatch.setattr(bootstrap, "_venv_fits", lambda: True)
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["bootstrap"])
    return commands


def test_the_build_backend_first_then_triton_next_to_everything_else(commands: Commands) -> None:
    assert bootstrap.main() == 0
    first, *others = commands.installed
    assert first == "setuptools"
    assert sorted(others) == sorted([wheel.WHEEL, "uv", ".[cpu]"])


def test_a_new_environment_gets_the_pinned_pip(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_venv_fits", lambda: False)
    assert bootstrap.main() == 0
    assert "venv" in commands[0]
    assert {"pip", "setuptools"} < set(commands[1])


@pytest.mark.parametrize(
    ("arguments", "fails_at"),
    [([], "uv"), ([], "--torch-backend"), (["--pip-args=--no-index"], "")],
)
def test_pip_installs_what_uv_cannot(
    commands: Commands, arguments: list[str], fails_at: str
) -> None:
    """Where uv is not to be had, where it fails, and where the user has said what pip is to do."""
    commands.fails = lambda command: fails_at in command
    assert commands.set_up(*arguments) == 0
    last = next(command for command in reversed(commands) if ".[cpu]" in command)
    assert last[:3] == [str(bootstrap.VENV_PYTHON), "-m", "pip"]
    assert bootstrap._has_stamp(bootstrap._STAMP)


@pytest.mark.parametrize(
    ("runs", "extras"),
    [
        ([[]], []),
        ([["--slot"], ["--slot"], []], ["cpu,slot"]),
        ([["--slot"], ["--dev"], ["--dev"], ["--slot"], []], ["cpu,slot", "cpu,dev"]),
    ],
)
def test_what_was_set_up_is_not_again_and_more_is_added(
    commands: Commands, runs: list[list[str]], extras: list[str]
) -> None:
    commands.set_up()
    commands.clear()
    assert [commands.set_up(*each) for each in runs] == [0] * len(runs)
    wanted = [word for each in extras for word in ("setuptools", "uv", f".[{each}]")]
    assert commands.installed == wanted


def test_an_interrupted_install_is_repeated(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.fails = lambda command: ".[cpu]" in command
    assert bootstrap.main() == 1
    assert capsys.readouterr().err.startswith("set-up: pip failed")
    commands.clear()
    commands.fails = lambda command: False
    assert bootstrap.main() == 0
    assert commands.installed == ["setuptools", "uv", ".[cpu]"]


def test_an_index_for_torch_and_more_arguments_reach_pip(commands: Commands) -> None:
    index = "https://example.invalid/cpu"
    commands.set_up("--torch-index", index, "--pip-args=--proxy 'http://a b'")
    for command in commands:
        assert command[-4:] == ["--proxy", "http://a b", "--extra-index-url", index]


def test_an_unfit_machine_is_told_in_one_sentence(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine.platform, "machine", lambda: "riscv64")
    assert bootstrap.main() == 1
    message = capsys.readouterr().err
    assert message.startswith("set-up: The Triton server of the wheel needs Linux on x86_64")
    assert message.count("\n") == 1
    assert commands == []


def test_needs_nothing_but_the_standard_library() -> None:
    """It runs before anything is installed: -S leaves site-packages out."""
    assert "--torch-index" in python("-S", "-m", "pool.bootstrap", "--help", cwd=ROOT).stdout
