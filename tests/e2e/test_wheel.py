"""The wheel, installed where nothing else of ours is, serves; and takes no name but its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from urllib.request import urlopen
from zipfile import ZipFile

import pytest

from catalog.paths import ROOT, state_dir
from tests.support.processes import Marked, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.slow]

BUILT_FROM = (
    "catalog",
    "client",
    "clips",
    "model_repository",
    "orchestrator",
    "picker",
    "pool",
    "protocol",
    "worker",
)
LOADING_S = 180.0

COMPLETES = """
import asyncio, sys
from tidegate import Client

async def main():
    async with Client(sys.argv[1]) as client:
        answer = await client.generate("Once upon a time", max_tokens=8, temperature=0)
    print(len(answer.token_ids))

asyncio.run(main())
"""
RENDERS = """
import json, sys
from urllib.request import Request, urlopen

recipe = {"schema": "1.1", "text": "Good morning.", "video": {"size": 96}}
body = json.dumps({"recipe": recipe}).encode()
slots = sys.argv[1] + "/v2/slots"
request = Request(slots, body, {"Content-Type": "application/json"})
slot = slots + "/" + json.load(urlopen(request))["slot_id"]
urlopen(slot + "/events").read()
print(json.load(urlopen(slot))["outcome"], urlopen(slot + "/outputs/clip.mp4").read()[4:8])
"""
OURS = "import importlib.util as u; print([n for n in {} if u.find_spec(n)])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools would leave a build/ in the checkout, and reuse it."""
    copy, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in BUILT_FROM:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(copy))
    (wheel,) = built.iterdir()
    return wheel


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that has the wheel, and what it depends on: our own, borrowed by a path,
    which leaves out the editable install of the checkout. Without numba, an extra, whose machine
    code would be made again for this place."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    pip("--python", str(python), "install", "--no-compile", "--no-deps", "--no-index", str(wheel))
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    (site / "numba.py").write_text("raise ImportError('left out')")
    return python


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr


def test_serves_where_nothing_else_of_ours_is(python: Path, tmp_path: Path) -> None:
    marked = Marked()
    env = {name: value for name, value in marked.env.items() if name != "PYTHONPATH"}
    env["TIDEGATE_HOME"] = str(state_dir())  # which has a Triton: nothing is fetched
    state_file, output = tmp_path / "state.json", tmp_path / "output"
    for name in ("orchestrator", "worker", "pip"):  # a user's own, where it is started
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('not this one')")
    tidegate = python.with_name("tidegate")
    command = [tidegate, "up", "--device", "cpu", "--port", "0", "--slot"]
    with output.open("wb") as log:
        up = subprocess.Popen(
            [*command, "--state-file", state_file],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def run(program: str, *arguments: str) -> str:
        command = [python, "-P", "-c", program, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        eventually(
            lambda: state_file.exists() or up.poll() is not None,
            lambda: f"not up:\n{output.read_text()}",
            LOADING_S,
        )
        assert up.poll() is None, output.read_text()
        regions = marked.regions()
        url = json.loads(state_file.read_text())["url"]
        assert run(COMPLETES, url) == "8"

        # Text is served as soon as there is any; clips have a Triton of their own.
        def serves_clips() -> bool:
            with urlopen(f"{url}/v2/instances") as answer:
                instances = json.load(answer)["instances"]
            return any((each.get("slot") or {}).get("ready") for each in instances)

        eventually(serves_clips, output.read_text, LOADING_S)
        assert run(RENDERS, url) == "met b'ftyp'"
        up.terminate()
        assert up.wait(60) == 0
        marked.wait_gone(regions)
    finally:
        for pid in marked.pids():
            os.kill(pid, signal.SIGKILL)
        up.wait()
    generic = [*BUILT_FROM, "perf"]
    assert run(OURS.format(generic)) == "[]"


def test_the_wheel_has_what_runs_and_nothing_else(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    runtime = "tidegate/_runtime/"
    tops = {name.removeprefix(runtime).split("/")[0] for name in names if runtime in name}
    assert tops == {*BUILT_FROM} - {"client"}
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"tidegate"}
    assert f"{runtime}worker/demo_model/checkpoint/model.safetensors" in names
    assert {f"{runtime}model_repository/{model}/config.pbtxt" for model in ("llm", "slot")} < {
        *names
    }
    assert f"{runtime}model_repository/slot/1/model.py" in names
    weights = ROOT / "clips" / "render" / "stages" / "tiny_clip_weights"
    assert {f"{runtime}{p.relative_to(ROOT)}" for p in weights.iterdir()} <= {*names}
    assert "tidegate/py.typed" in names
    assert not [name for name in names if "tests" in name]
    static = ROOT / "orchestrator/api/page/static"
    files = {path.relative_to(ROOT).as_posix() for path in static.rglob("*") if path.is_file()}
    assert len(files) > 10
    assert {f"{runtime}{name}" for name in files} <= set(names)
    sources = {"tidegate/": ROOT / "client" / "tidegate"} | {
        f"{runtime}{top}/": ROOT / top for top in tops
    }
    expected = {
        f"{prefix}{path.relative_to(folder)}"
        for prefix, folder in sources.items()
        for path in folder.rglob("*.py")
    }
    assert expected == {name for name in names if name.endswith(".py")}
