"""``tidegate pool`` on the real Triton, under load: one is killed, the manager is, one comes, one
goes; every request is answered, and at the end nothing is left (PV-1)."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from catalog.paths import ROOT
from tests.support.processes import Marked, eventually
from tests.support.stack import asked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.slow]

TIDEGATE = (sys.executable, "-m", "tidegate", "pool")
LOADING_S = 120.0
CLIENTS = 3
BODY = {"model": "demo", "prompt": "Once", "max_tokens": 15, "ignore_eos": True}
BODY |= {"stream": True, "stream_options": {"include_usage": True}}


class Pool:
    """A pool with a home of its own; its manager may be started again."""

    def __init__(self, folder: Path) -> None:
        self.marked = Marked()
        self.folder = folder
        self.file = folder / "pool.toml"
        self.manager: subprocess.Popen[bytes] | None = None

    def ask_for(self, *names: str) -> None:
        """Have these in the file."""
        text = f'[pool]\nhome = "{self.folder / "home"}"\ndrain_s = 5\n'
        text += "[orchestrator]\nport = 0\n"
        for name in names:
            text += f'[[instances]]\nname = "{name}"\nmodel = "demo"\nengine = "synthetic-paced"\n'
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.file)

    def run(self) -> None:
        with (self.folder / "manager.log").open("ab") as log:
            self.manager = subprocess.Popen(
                [*TIDEGATE, "run", str(self.file)],
                cwd=ROOT,
                env=self.marked.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*TIDEGATE, *words], cwd=ROOT, env=self.marked.env, capture_output=True, text=True
        )

    @property
    def state(self) -> dict[str, Any]:
        """As the manager keeps it."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "home/state.json").read_text())
        except FileNotFoundError:
            return {"instances": {}}
        return found

    def pids(self) -> dict[str, int]:
        """Of the processes under the guardians, by name."""
        return {name: each["pid"] for name, each in self.state["instances"].items()}

    def wait_ready(self, *names: str) -> None:
        """Until these and no others serve, and the orchestrator knows them."""

        def ready() -> bool:
            assert self.manager is not None and self.manager.poll() is None, self.said
            state = self.state
            found = state["instances"]
            return (
                state.get("manager_pid") == self.manager.pid  # not what an earlier one has left
                and set(found) == {*names, "orchestrator"}
                and all(each["state"] == "ready" for each in found.values())
                and self.known_ready() == {found[name]["address"] for name in names}
            )

        eventually(ready, lambda: f"not ready: {self.state}\n{self.said}", LOADING_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.state['instances']['orchestrator']['ports'][0]}"

    def known_ready(self) -> set[str]:
        """To the orchestrator."""
        try:
            listed = json.loads(asked(f"{self.url}/v2/instances", patience_s=5)[1])["instances"]
        except OSError:
            return set()
        return {each["address"] for each in listed if each["ready"]}

    @property
    def said(self) -> str:
        return (self.folder / "manager.log").read_text()


class Load:
    """Clients that ask for one stream after the other until the end, each to its last token."""

    def __init__(self, url: str, **asked: object) -> None:
        self.texts: list[str] = []
        self.failed: list[str] = []
        self._url = url
        self._body = BODY | asked
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def goes_on(self) -> None:
        """Wait for answers to requests that begin from now on."""
        enough = len(self.texts) + 2 * CLIENTS
        eventually(lambda: len(self.texts) >= enough, lambda: f"no more answers: {self.failed}")

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self) -> None:
        while not self._is_over.is_set():
            status, told = asked(f"{self._url}/v1/completions", self._body)
            if status == 200 and '"completion_tokens":15,' in told.replace(" ", ""):
                self.texts.append(told)
            else:
                self.failed.append(f"{status}: {told[-300:]}")
                time.sleep(0.05)


@pytest.fixture
def pool(tmp_path: Path, marks: list[Marked]) -> Iterator[Pool]:
    pool = Pool(tmp_path)
    marks.append(pool.marked)
    yield pool
    if pool.manager is not None and pool.manager.poll() is None:
        pool.manager.kill()
        pool.manager.wait()


def test_pv1_a_pool_keeps_serving_whatever_is_killed_added_or_removed(pool: Pool) -> None:
    pool.ask_for("a", "b")
    pool.run()
    pool.wait_ready("a", "b")
    load = Load(pool.url)
    try:
        load.goes_on()
        before = pool.pids()
        os.kill(before["a"], signal.SIGKILL)
        eventually(lambda: pool.pids()["a"] not in (None, before["a"]), lambda: pool.said)
        pool.wait_ready("a", "b")
        load.goes_on()

        before = pool.pids()
        assert pool.manager is not None
        pool.manager.kill()
        pool.manager.wait()
        load.goes_on()
        unmanaged = pool.command("status", str(pool.file))
        assert unmanaged.stdout.count("unmanaged") == 3 and "no manager runs" in unmanaged.stderr
        pool.run()
        pool.wait_ready("a", "b")
        assert pool.pids() == before, "the very same, and no twins"

        pool.ask_for("b", "c")
        pool.wait_ready("b", "c")
        assert pool.pids()["b"] == before["b"], "untouched"
        load.goes_on()

        pool.file.write_text("[pool]\nhart = 1\n")
        os.kill(pool.manager.pid, signal.SIGHUP)
        eventually(lambda: "pool.hart" in pool.said, lambda: pool.said)
        assert pool.pids()["b"] == before["b"]
        load.goes_on()
    finally:
        load.end()
    assert load.failed == []
    pool.ask_for("b", "c")
    regions = pool.marked.regions()
    pool.manager.terminate()
    assert pool.manager.wait(30) == 0
    pool.marked.wait_gone(regions)
    assert list((pool.folder / "home/run").iterdir()) == []
