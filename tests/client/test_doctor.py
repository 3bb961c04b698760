"""``tidegate doctor`` says when a running service needs more instances (PF-7)."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tidegate.cli import doctor
from tidegate.cli.main import main

METRICS = """\
tidegate_instances_needed{model="m",process="a:1"} 1
tidegate_instances_needed{model="m",process="b:1"} 3.2
tidegate_instances_needed{model="n",process="b:1"} 0.1
tidegate_instance_slots{instance="a:1"} 8
tidegate_instance_slots{instance="b:1"} 8
"""


@pytest.fixture
def port() -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode() if self.path == "/metrics" else b"")

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_doctor_asks_who_listens_there(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--device", "cpu", "--port", str(port), "--json"])
    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["instances"]["found"] == "the present load needs 4 of 2"
    assert findings["instances"]["advice"] == "add 2"
    assert doctor.look("127.0.0.1", 9) is None
