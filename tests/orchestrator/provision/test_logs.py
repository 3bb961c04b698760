"""The one useful part of a Triton log."""

from pathlib import Path

import pytest

from orchestrator.provision.logs import fresh_log, tail, why_triton_ended

LOAD_FAILED = r"""
I1120 19:39:40.968527 11135 model_lifecycle.cc:472] "loading: llm:1"
I1120 19:39:41.105399 11135 pb_stub.cc:366] "Failed to initialize Python stub: ValueError: no\n"
E1120 19:39:41.319937 11135 backend_model.cc:692] "ERROR: Failed to create instance: ValueError"
E1120 19:39:41.320038 11135 model_lifecycle.cc:642] "failed to load 'llm' version 1: Internal: RuntimeError: no \"cuda\" here\n  use --device cpu\n\nAt:\n  /m/llm/1/model.py(3): initialize\n"
I1120 19:39:41.320055 11135 model_lifecycle.cc:777] "failed to load 'llm'"
+-------+---------+
error: creating server: Invalid argument - load failed for model 'llm': version 1 is at UNAVAILABLE
"""  # noqa: E501

LOAD_FAILED_OLD = """
E0101 00:00:00.000000 1 a.cc:638] failed to load 'llm' version 1: Internal: KeyError: 'x'

At:
  /m/llm/1/model.py(3): initialize
"""

PORT_TAKEN = """
E1120 19:39:37.911016 11070 main.cc:245] "failed to start GRPC service: Unavailable - Socket '127.0.0.1:18101' already in use "
"""  # noqa: E501

USAGE = """\
/opt/tritonserver/bin/tritonserver: unrecognized option '--nonsense'
Usage: tritonserver [options]
  --help
\tPrint usage
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "triton.log"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LOAD_FAILED, 'model llm: RuntimeError: no "cuda" here\n  use --device cpu'),
        (LOAD_FAILED_OLD, "model llm: KeyError: 'x'"),
        (
            PORT_TAKEN,
            "failed to start GRPC service: Unavailable - Socket '127.0.0.1:18101' already in use",
        ),
        (USAGE, "/opt/tritonserver/bin/tritonserver: unrecognized option '--nonsense'"),
        ("one\n\ntwo\n", "one\ntwo"),
    ],
)
def test_says_why_in_a_few_words(log: Path, text: str, reason: str) -> None:
    fresh_log(log)
    log.write_text(text)
    assert why_triton_ended(log) == reason


def test_no_log_is_no_error(log: Path) -> None:
    assert tail(log) == ""


def test_the_last_runs_log_is_kept(log: Path) -> None:
    fresh_log(log)
    log.write_text("first")
    fresh_log(log)
    assert not log.exists()
    assert log.with_name("triton.log.1").read_text() == "first"
