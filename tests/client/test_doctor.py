"""``tidegate doctor`` says when a running service needs more instances (PF-7)."""

import io

import pytest

from tidegate.cli import doctor

METRICS = b"""\
tidegate_instances_needed{model="m",process="a:1"} 1
tidegate_instances_needed{model="m",process="b:1"} 3.2
tidegate_instances_needed{model="n",process="b:1"} 0.1
tidegate_instance_slots{instance="a:1"} 8
tidegate_instance_slots{instance="b:1"} 8
"""


def test_the_doctor_asks_who_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.look("127.0.0.1", 9) is None, "nobody does"
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(METRICS))
    finding = doctor.look("127.0.0.1", 9)
    assert finding is not None
    assert (finding.found, finding.advice) == ("the present load needs 4 of 2", "add 2")
