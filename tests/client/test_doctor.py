"""``tidegate doctor`` says when a running service needs more instances, or fewer (PF-7)."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pool.preflight.checkup import Verdict
from tidegate.cli import doctor
from tidegate.cli.top import Samples

QUIET = """\
tidegate_instances_needed{model="m",process="a:1"} 1
tidegate_instances_needed{model="m",process="b:1"} 1
tidegate_instance_slots{instance="a:1"} 8
tidegate_instance_slots{instance="b:1"} 8
tidegate_http_responses_total{route="/v1/chat/completions",status="200"} 1000
tidegate_queue_ms_bucket{le="10"} 990
tidegate_queue_ms_bucket{le="+Inf"} 1000
tidegate_total_ms_bucket{le="1000"} 1000
tidegate_total_ms_bucket{le="+Inf"} 1000
"""


def judged(text: str) -> tuple[Verdict, str, str]:
    finding = doctor.judge(Samples.parse(text, 0.0))
    return finding.verdict, finding.found, finding.advice


def test_an_idle_one_may_have_fewer() -> None:
    verdict, found, advice = judged(QUIET)
    assert verdict is Verdict.OK and "the present load needs 1 of 2" in found
    assert advice.startswith("1 would do")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('tidegate_instance_slots{instance="b:1"} 8\n', ""),  # the only one
        ('process="b:1"} 1', 'process="b:1"} 2'),  # which has more waiting
        ('model="m",process="b:1"', 'model="n",process="b:1"'),
        ('status="200"} 1000', 'status="200"} 10'),  # says nothing yet
    ],
)
def test_one_that_is_needed_stays(old: str, new: str) -> None:
    assert old in QUIET
    verdict, _, advice = judged(QUIET.replace(old, new))
    assert (verdict, advice) == (Verdict.OK, "")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('process="a:1"} 1', 'process="a:1"} 3', "the present load needs 3, and there are 2"),
        ('status="200"} 1000', 'status="503"} 1000', "100.0 % of answers were 503"),
        ('total_ms_bucket{le="1000"}', 'total_ms_bucket{le="5000"}', "took more than 3.0 s"),
        (
            'queue_ms_bucket{le="10"} 990',
            'misses_total{stage="queue"} 9\ntidegate_queue_ms_bucket{le="500"} 990',
            "9 requests missed their deadline because they waited",
        ),
    ],
)
def test_reasons_to_add_one(old: str, new: str, said: str) -> None:
    assert old in QUIET
    verdict, found, advice = judged(QUIET.replace(old, new))
    assert verdict is Verdict.WARN and said in found and advice == "add 1"


@pytest.fixture
def port() -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(QUIET.encode() if self.path == "/metrics" else b"")

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
    from tidegate.cli.main import main

    main(["doctor", "--device", "cpu", "--port", str(port), "--json"])
    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["instances"]["advice"].startswith("1 would do")


def test_nobody_there_is_no_finding() -> None:
    assert doctor.look("127.0.0.1", 9) is None
