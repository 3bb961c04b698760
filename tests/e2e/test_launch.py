"""``tidegate up`` as a person runs it: it serves, comes back from crashes, and however it ends
leaves no process and no shared memory (OR-14, PV-1)."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from catalog.paths import DEMO_CHECKPOINT, ROOT, journal_file, state_dir
from pool import bootstrap
from pool.engines import triton_wheel as wheel
from pool.process.ports import is_free
from tests.support.processes import Marked, eventually
from tests.support.stack import asked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.slow]

UP = (sys.executable, "-m", "tidegate", "up", "--device", "cpu", "--port", "0")
PACED = ("--engine", "synthetic-paced", "--model-name", "demo")
LOADING_S = 180.0


class Up:
    """A running ``tidegate up``, told from every other by a mark that its processes inherit."""

    def __init__(
        self,
        marks: list[Marked],
        tmp_path: Path,
        *arguments: str,
        wrapper: tuple[str, ...] = (),
        made_in: Path | None = None,
        env: Mapping[str, str] = {},
    ) -> None:
        """``made_in``: a checkout in which ``make demo`` runs it."""
        self.marked = Marked()
        marks.append(self.marked)
        self._state_file = tmp_path / "state.json"
        self._output = tmp_path / "output"
        words = ["--state-file", str(self._state_file), *arguments]
        made = ["make", "demo", "PORT=0", f"ARGS={shlex.join(words)}"]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                made if made_in else [*wrapper, *UP, *words],
                cwd=made_in or ROOT,
                env={**self.marked.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        eventually(self._serves_or_ended, lambda: f"not up:\n{self.output}", LOADING_S)
        assert self.process.poll() is None, self.output
        self.regions = self.marked.regions()

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def state(self) -> dict[str, Any]:
        """Address, ports and process ids, as of now."""
        state: dict[str, Any] = json.loads(self._state_file.read_text())
        return state

    def instance(self, name: str) -> dict[str, Any]:
        """Ports and process ids of an instance, as of now."""
        (found,) = (each for each in self.state["instances"] if each["name"] == name)
        return found

    def pid_of(self, role: str) -> int:
        instance = self.state["instances"][0]
        return {
            "launcher": self.state["launcher_pid"],
            "orchestrator": self.state["orchestrator_pid"],
            "server": instance["pid"],
            "stub": next(iter(instance.get("stub_pids", ())), None),
        }[role]

    def ask(self, path: str, body: object = None) -> tuple[int, str]:
        """Status and answer; 0 where nobody answers."""
        try:
            return asked(f"{self.state['url']}{path}", body)
        except OSError:
            return 0, ""

    def is_ready(self) -> bool:
        return self.ask("/health/ready")[0] == 200

    def stream(self, max_tokens: int, model: str = "demo") -> HTTPResponse:
        """An open SSE response; ended by the caller."""
        body = {"model": model, "prompt": "Once", "stream": True, "max_tokens": max_tokens}
        request = urllib.request.Request(
            f"{self.state['url']}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=60)

    def generates(self, model: str = "demo") -> bool:
        """Whether a short generation goes through to its end."""
        body = {"model": model, "prompt": "Once", "stream": True, "max_tokens": 3}
        return "[DONE]" in self.ask("/v1/completions", body)[1]

    def submit(self, **task: object) -> str:
        """Hand in a task; where to ask for it."""
        body = {"model": "demo", "prompt": "Once", "ignore_eos": True, **task}
        status, told = self.ask("/v2/tasks", body)
        assert status == 202, told
        return f"/v2/tasks/{json.loads(told)['task_id']}"

    def outcome_of(self, task: str) -> str | None:
        """None while it has not ended, or nobody answers."""
        status, told = self.ask(task)
        outcome: str | None = json.loads(told).get("outcome") if status == 200 else None
        return outcome

    def end(self, signum: signal.Signals, model: str = "demo") -> None:
        """By a signal while a stream runs: nothing is left, and it says so."""
        regions = self.marked.regions()
        with self.stream(max_tokens=1000, model=model) as response:
            assert response.readline().startswith(b"data: ")
            os.kill(self.pid_of("launcher"), signum)
            assert self.process.wait() == 0
            response.read()  # ends, one way or another
        self.marked.wait_gone(regions)
        assert re.search(r"ended in \d+\.\d s, nothing left", self.output)

    def _serves_or_ended(self) -> bool:
        return self._state_file.exists() or self.process.poll() is not None


def lay_out(checkout: Path) -> None:
    """A checkout that is set up, with everything but most of the tests."""
    for part in (
        *("catalog", "client", "clips", "model_repository", "orchestrator", "picker", "pool"),
        "protocol",
    ):
        shutil.copytree(ROOT / part, checkout / part)
    (checkout / "worker").symlink_to(ROOT / "worker")  # with what was compiled of it
    (checkout / "tests" / "support").mkdir(parents=True)
    needed = ("__init__", "conftest", "test_layers", "support/lazy", "support/steady_loop")
    tests = [f"tests/{name}.py" for name in (*needed, "support/__init__")]
    for name in ("Makefile", "constraints.txt", "pyproject.toml", *tests):
        shutil.copyfile(ROOT / name, checkout / name)
    (checkout / ".venv").mkdir()
    for found in Path(sys.prefix).iterdir():
        if found.name not in bootstrap._COVERS:
            (checkout / ".venv" / found.name).symlink_to(found)
    stamp = "from pool import bootstrap as b\nfor name in b._COVERS:\n  "
    stamp += "(b.VENV / name).write_text(b._stamp())"
    subprocess.run([checkout / ".venv/bin/python", "-c", stamp], cwd=checkout, check=True)


def test_a_checkout_and_a_model_may_lie_anywhere(tmp_path: Path, marks: list[Marked]) -> None:
    """Spaces and umlauts in every path there is: code, packages, Triton, model, state, scratch.

    Both commands of the README run there, and ``tidegate doctor``."""
    checkout = tmp_path / "a b" / "ü"
    lay_out(checkout)
    home, model = checkout / "höme", checkout / "modèle ü"
    home.mkdir()
    (home / "triton-0.7.0").symlink_to(wheel.wheel_dir(state_dir()))
    shutil.copytree(DEMO_CHECKPOINT, model)
    places = {"TIDEGATE_HOME": home, "TMPDIR": checkout / "t m p", "HOME": checkout / "h ö m e"}
    for place in places.values():
        place.mkdir(exist_ok=True)
    env = {name: str(place) for name, place in places.items()}
    # What is set up is set up: pip, whose packages would be this environment's own, finds nothing.
    env |= {"PYTHONPATH": "client", "MAKEFLAGS": "", "PIP_NO_INDEX": "1"}

    def runs(*command: str) -> str:
        done = subprocess.run(
            command, cwd=checkout, env=os.environ | env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    collected = runs("make", "test", "ARGS=--collect-only -q tests/test_layers.py")
    assert "tests/test_layers.py::" in collected
    # As the kernel would run it, had pip written it there.
    assert "It can serve" in runs(".venv/bin/python", ".venv/bin/tidegate", "doctor", "--port", "0")
    up = Up(
        marks,
        checkout,
        *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
        *("--model", str(model), "--engine", "synthetic-paced"),
        made_in=checkout,
        env=env,
    )
    assert up.generates("modèle ü")
    up.end(signal.SIGTERM, "modèle ü")


@pytest.mark.parametrize("follows", [False, True])
def test_who_is_killed_takes_everything_along(
    tmp_path: Path, marks: list[Marked], follows: bool
) -> None:
    """The launcher, or the process that started it and that it is to follow."""
    wrapper = (sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])")
    options = ["--follow-parent"] if follows else []
    up = Up(marks, tmp_path, *PACED, *options, wrapper=wrapper if follows else ())
    with up.stream(max_tokens=1000) as response:
        response.readline()
        up.process.kill()
        up.process.wait()
        up.marked.wait_gone(up.regions)


def test_what_is_killed_comes_back_until_ctrl_c(tmp_path: Path, marks: list[Marked]) -> None:
    """Each half is started again on its ports; its shared memory of before is gone."""
    up = Up(marks, tmp_path, *PACED)
    assert up.generates()
    url = up.state["url"]
    journal = journal_file(state_dir(), "127.0.0.1", int(str(url).rpartition(":")[2]))
    assert journal.stat().st_mode & 0o777 == 0o600
    for role in ("stub", "server", "orchestrator"):
        victim, regions = up.pid_of(role), up.marked.regions()
        durable = up.submit(max_tokens=300, durable=True) if role == "orchestrator" else ""
        os.kill(victim, signal.SIGKILL)
        eventually(
            lambda role=role, victim=victim: up.pid_of(role) != victim and up.is_ready(),
            lambda role=role: f"{role} did not come back:\n{up.output}",
            LOADING_S,
        )
        assert up.generates(), f"after the {role} was killed"
        assert up.state["url"] == url
        if durable:  # out of the box it outlives the process that promised it
            eventually(
                lambda task=durable: up.outcome_of(task) == "met", lambda: up.output, LOADING_S
            )
        if role != "orchestrator":
            assert not regions & up.marked.regions()
            assert not any(Path("/dev/shm", name).exists() for name in regions)
    up.end(signal.SIGINT)
    assert not list(journal.parent.glob(f"{journal.name}*"))  # at a port that nobody asks again


def test_two_instances_serve_next_to_each_other_until_the_terminal_goes(
    tmp_path: Path, marks: list[Marked]
) -> None:
    """On IPv6, where this machine has it."""
    host, at = ("::1", "[::1]") if is_free("::1", 0) else ("127.0.0.1",) * 2
    up = Up(marks, tmp_path, *PACED, "--instances", "2", "--host", host, "--triton-host", host)
    assert up.state["url"].startswith(f"http://{at}:")
    assert [each["name"] for each in up.state["instances"]] == ["triton-0", "triton-1"]
    assert up.generates()
    assert len(up.regions) == 2  # in which prompts and answers travel
    assert {Path("/dev/shm", name).stat().st_mode & 0o777 for name in up.regions} == {0o600}
    up.end(signal.SIGHUP)


def fails(marked: Marked, *arguments: str) -> str:
    """Run it to its failure; the last message."""
    done = subprocess.run(
        [*UP, *arguments], cwd=ROOT, env=marked.env, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout
    marked.wait_gone(set())
    return done.stderr


def test_what_keeps_it_from_starting_is_said_in_a_few_words(
    tmp_path: Path, marks: list[Marked]
) -> None:
    marked = Marked()
    marks.append(marked)
    assert "/nowhere does not exist; --model takes a folder" in fails(marked, "--model", "/nowhere")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        assert f"127.0.0.1:{port}: Address already in use; choose another one: --port" in fails(
            marked, "--port", port
        )
    (tmp_path / "config.json").write_text("{}")
    message = fails(marked, "--model", str(tmp_path))
    assert re.match(r"tidegate: triton ended with status 1:\nmodel llm: ", message)
    assert len(message.splitlines()) < 12
