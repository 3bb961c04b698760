"""A real Triton with our worker, and a real orchestrator in front, for tests that need both."""

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from catalog.paths import DEMO_CHECKPOINT, MODEL_REPOSITORY, state_dir
from orchestrator.tls import Tls
from perf.stack.constants import repository_with, with_constants
from pool.engines.triton import TritonPorts, TritonSpec, find_triton
from pool.process.ports import free_ports
from pool.process.process import command_environment
from pool.units.triton import TritonInstance
from protocol.tensors import MODEL_NAME
from tests.support.processes import PATIENCE_S, eventually

T = TypeVar("T")
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""Device that workers of the tests compute on: ``cpu`` or ``cuda``."""
DOWN_AFTER_S = "orchestrator.lanes.config.DOWN_AFTER_S"


class LoopThread:
    """An event loop of its own, so that processes outlive the loop of any one test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Triton:
    """One real Triton with our ``llm`` model; ``worker`` are its settings, with ``__`` for each dot
    of a name, and constants, which are named with their modules.

    With ``model="slot"`` it has that one, and they are its.
    """

    def __init__(
        self,
        *,
        repository: Path = MODEL_REPOSITORY,
        lane_token: str = "",
        is_locked: bool = True,
        tls: Tls | None = None,
        model: str = MODEL_NAME,
        environment: Mapping[str, str | None] | None = None,
        **worker: object,
    ) -> None:
        """``environment``: further variables, of an engine's own environment say."""
        settings: dict[str, object] = {"device": DEVICE}
        if model == MODEL_NAME:
            settings |= {"model_path": DEMO_CHECKPOINT, "model_name": "demo"}
        prefix = "TIDEGATE_WORKER" if model == MODEL_NAME else f"TIDEGATE_{model.upper()}"
        constants = {name: worker.pop(name) for name in list(worker) if "." in name}
        if constants:
            folder = tempfile.TemporaryDirectory(prefix="tidegate-models-")
            repository = repository_with(constants, Path(folder.name))
            weakref.finalize(self, folder.cleanup)
        env = {f"{prefix}__{k.upper()}": str(v) for k, v in (settings | worker).items()}
        env |= {name: value for name, value in (environment or {}).items() if value is not None}
        spec = TritonSpec(
            repository, (model,), env=env, lane_token=lane_token, tls=tls, is_locked=is_locked
        )
        logs = state_dir() / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._loop = LoopThread()
        ports = TritonPorts(*free_ports(3))
        name = f"e2e-{ports.grpc}"
        install = find_triton(None, state_dir())
        self.log = logs / f"{name}.log"
        self.instance = TritonInstance(name, install, spec, ports, log=self.log)

    def start(self) -> None:
        self._loop.run(self.instance.start())

    def stop(self, drain_s: float = 1.0) -> None:
        self._loop.run(self.instance.stop(drain_s))

    def close(self) -> None:
        self.stop()
        self._loop.close()

    @property
    def server_pid(self) -> int:
        return int(self.instance.describe()["pid"])

    @property
    def stub_pid(self) -> int:
        return int(self.instance.describe()["stub_pids"][0])

    @property
    def grpc(self) -> str:
        return self.instance.grpc_address

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.instance.ports.http}"


class Orchestrator:
    """A real ``python -m orchestrator`` in front of ``instances``, with some settings, and
    constants, which are named with their modules."""

    def __init__(self, *instances: str, **settings: object) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self._constants = {name: settings.pop(name) for name in list(settings) if "." in name}
        env = {"INSTANCES": ",".join(instances), "HOST": "127.0.0.1", "PORT": self.port} | settings
        self._env = command_environment({f"TIDEGATE_{k.upper()}": str(v) for k, v in env.items()})
        self.log = state_dir() / "logs" / f"e2e-orchestrator-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, patience_s: float = PATIENCE_S) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                with_constants(self._constants), env=self._env, stdout=log, stderr=log
            )
        ready = "/health/ready"
        eventually(lambda: self.status(ready) == 200, "the orchestrator to be ready", patience_s)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()

    def status(self, path: str) -> int:
        """HTTP status of a GET; 0 when nobody answers."""
        try:
            return asked(self.url + path, patience_s=5)[0]
        except OSError:
            return 0

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have ``labels``; 0 where there is none."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=5) as response:
            page = response.read().decode()
        # The parser takes longer for a whole page than what is waited for.
        text = "".join(line for line in page.splitlines(True) if line.startswith(name))
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def asked(url: str, body: object = None, patience_s: float = 60.0) -> tuple[int, str]:
    """Status and text of a GET, or of a POST of ``body``."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=patience_s) as response:
            return int(response.status), response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@contextmanager
def running(thing: Triton | Orchestrator) -> Iterator[None]:
    """Start on entry, stop on exit whatever happened; what was not killed is to end cleanly."""
    thing.start()
    try:
        yield
    finally:
        assert thing.stop() in (None, 0, -signal.SIGKILL), "it did not end cleanly"


@contextmanager
def started(*tritons: Triton) -> Iterator[None]:
    """Start them one after the other; all are gone on exit."""
    try:
        for triton in tritons:
            triton.start()
        yield
    finally:
        for triton in tritons:
            triton.close()
