"""A pod is ended as a kubelet ends one; the whole upgrade is ``python -m perf.rollout``."""

import sys
from pathlib import Path

import pytest

from perf.rollout import pods
from perf.rollout.__main__ import judge
from perf.rollout.clients import ClientRecord
from perf.rollout.pods import Cluster, Pod
from pool.process.ports import free_ports

SCRIPT = """
import http.server, pathlib, signal, sys
what, port, file = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
def note(text):
    with file.open("a") as out:
        out.write(text + "\\n")
if what == "hook":
    note("preStop")
    sys.exit()
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
def end(*_):
    note("SIGTERM")
    if what == "ends":
        sys.exit()
signal.signal(signal.SIGTERM, end)
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods, "_TIDEGATE", (sys.executable, "-I", "-c", SCRIPT))
    monkeypatch.setattr(pods, "SLEEP_S", 0.05)


def pod(what: str, folder: Path) -> Pod:
    (port,) = free_ports(1)
    notes = str(folder / "notes")
    hook = ("hook", "0", notes)
    address = f"127.0.0.1:{port}"
    command = (what, str(port), notes)
    return Pod(what, command, {}, address, (port, "/"), folder / "log", hook)


async def test_the_hook_runs_before_sigterm(tmp_path: Path) -> None:
    one = pod("ends", tmp_path)
    await one.start()
    _, was_killed = await one.delete()
    assert not was_killed
    assert (tmp_path / "notes").read_text().split() == ["preStop", "SIGTERM"]


async def test_what_outlasts_the_grace_is_killed_and_counts_as_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "GRACE_S", 1.0)
    one = pod("stays", tmp_path)
    await one.start()
    cluster = Cluster(tmp_path, {})
    cluster.ended.add(one, *await one.delete())
    assert cluster.ended.killed == ["stays"]
    assert any("SIGKILL" in fault for fault in judge(ClientRecord(), cluster))


def test_a_long_wait_is_a_fault(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {})
    assert judge(ClientRecord(longest_wait_s=1.0, longest_silence_s=1.0), cluster) == []
    (fault,) = judge(ClientRecord(longest_silence_s=pods.DRAIN_S + 1), cluster)
    assert "waited" in fault
