"""What is said to install is what the extras have, and works wherever it is said."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from worker.extras import PACKAGES, pip_install

REPOSITORY = Path(__file__).parents[2]


def test_packages_are_those_of_the_extras() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    known = project["optional-dependencies"]
    assert {name: list(packages) for name, packages in PACKAGES.items()} == {
        name: known[name] for name in PACKAGES
    }


def test_the_command_is_this_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(pip_install("slot"))
    assert words == [sys.executable, "-m", "pip", "install", "av>=14", "espeakng-loader>=0.2"]
    monkeypatch.setattr(sys, "executable", "/a b/python3")
    assert pip_install("cpu") == "'/a b/python3' -m pip install 'numba>=0.61'"
    monkeypatch.setattr(sys, "executable", "/opt/triton_python_backend_stub")
    assert pip_install("cpu").startswith("python -m pip install ")


def test_nobody_is_told_to_install_tidegate_by_name() -> None:
    """No index has it: only a checkout or a wheel does."""
    by_name = re.compile(r"""pip install ['"]?tidegate(?!-)""")
    folders = ("orchestrator", "worker", "client", "docs", "docker", "README.md", "Makefile")
    files = (
        file for name in folders for file in [REPOSITORY / name, *(REPOSITORY / name).rglob("*")]
    )
    told = [
        str(file.relative_to(REPOSITORY))
        for file in files
        if file.is_file()
        and file.suffix in ("", ".py", ".md", ".js", ".html", ".yaml")
        and by_name.search(file.read_text())
    ]
    assert not told
