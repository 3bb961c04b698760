"""The command ``tidegate``: what it teaches, what it passes on, what it refuses."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from catalog.paths import DEMO_CHECKPOINT, ROOT
from orchestrator.tls import SETTING, Tls
from pool import command
from pool.preflight import host
from tests.client.conftest import Cli
from tidegate.cli.main import main
from tidegate.cli.runtime import INTERRUPTED


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TIDEGATE_")]:
        monkeypatch.delenv(name)


def test_up_serves_the_demo_model_unless_told_otherwise(launched: list[Any]) -> None:
    assert main(["up", "--device", "cpu"]) == 0
    spec, hint = launched[0]
    assert spec.worker_env == {
        "TIDEGATE_WORKER__MODEL_PATH": str(DEMO_CHECKPOINT),
        "TIDEGATE_WORKER__MODEL_NAME": "demo",
        "TIDEGATE_WORKER__DEVICE": "cpu",
    }
    assert (spec.host, spec.port, spec.serve) == ("127.0.0.1", 8080, True)
    assert "{url}/v1/chat/completions" in hint and '"model": "demo"' in hint


def test_a_model_of_ones_own_is_called_by_its_directory(
    launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "llama"
    model.mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEGATE_WORKER__DEVICE", "cpu")
    monkeypatch.setenv("TIDEGATE_WORKER__MAX_RUNNING", "8")
    assert main(["up", "--model", "llama", "--instances", "2", "--gpus", "0,1"]) == 0
    spec, hint = launched[0]
    assert spec.worker_env == {
        "TIDEGATE_WORKER__MODEL_PATH": str(model),
        "TIDEGATE_WORKER__DEVICE": "cpu",
        "TIDEGATE_WORKER__MAX_RUNNING": "8",
    }
    assert (spec.instances, spec.gpus) == (2, ("0", "1"))
    assert '"model": "llama"' in hint


def test_a_variable_that_no_worker_has_is_refused_before_anything_starts(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("TIDEGATE_WORKER_KV_BLOCKS", "64")
    monkeypatch.setenv("TIDEGATE_WORKER__DEVIC", "cpu")
    said = cli("up", "--device", "cpu", status=command.EXIT_FAILED).err
    assert "_KV_BLOCKS: not a setting; did you mean TIDEGATE_WORKER__KV__BLOCKS?" in said
    assert "TIDEGATE_WORKER__DEVIC: not a setting; did you mean TIDEGATE_WORKER__DEVICE?" in said
    assert launched == []


def test_clips_alone(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, cli: Cli, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "find_spec", lambda name: name)
    monkeypatch.setenv("TIDEGATE_WORKER__MODEL_PATH", str(tmp_path))  # which holds no model
    assert main(["up", "--device", "cpu", "--slot", "--no-llm"]) == 0
    ((spec, hint),) = launched
    assert spec.models == ("slot",)
    assert "/v2/slots" in hint and "/v1/chat" not in hint
    assert "--no-llm without --slot leaves nothing to serve" in cli("up", "--no-llm", status=2).err


def test_clips_without_their_packages_are_refused_before_anything_starts(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    assert "pip install 'av>=14'" in cli("up", "--slot", status=command.EXIT_FAILED).err
    assert launched == []


def test_the_lane_token_is_the_operators_where_one_is_set(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("TIDEGATE_WORKER__LANE_TOKEN", "chosen")
    assert main(["up", "--triton-open"]) == 0
    monkeypatch.setenv("TIDEGATE_LANES__TOKEN", "chosen")
    assert main(["worker"]) == 0
    specs = [spec for spec, _ in launched]
    assert [(spec.lane_token, spec.triton_open) for spec in specs] == [
        ("chosen", True),
        ("chosen", False),
    ]
    assert "chosen" not in repr(specs)
    monkeypatch.setenv("TIDEGATE_LANES__TOKEN", "another")
    said = cli("up", status=command.EXIT_FAILED).err
    assert "TIDEGATE_LANES__TOKEN and TIDEGATE_WORKER__LANE_TOKEN differ" in said
    assert "chosen" not in said and "another" not in said


def test_or25_tls_to_triton_is_what_the_environment_says(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    assert main(["up"]) == 0
    monkeypatch.setenv(SETTING, "{}")
    assert main(["worker"]) == 0
    assert [spec.tls for spec, _ in launched] == [None, Tls()]
    for stated, said in (
        ("pem", "expected JSON"),
        ('{"ca": "none.pem"}', "ca: cannot use none.pem: No such file or directory"),
        ('{"cert": "none.pem"}', "cert: Extra inputs are not permitted"),
    ):
        monkeypatch.setenv(SETTING, stated)
        assert f"tidegate: {SETTING}: {said}" in cli("up", status=command.EXIT_FAILED).err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["up", "--port", "65536"], "--port: 65536 is not in the range 0<=x<=65535"),
        (["up", "--instances", "0"], "--instances: 0 is not in the range 1<=x<=128"),
        (["up", "--drain", "nan"], "--drain: expected a finite number, got nan"),
        (["up", "--device", "gpu"], "--device: 'gpu' is not one of 'cuda', 'cpu'; see"),
        (["chat", "--deadline-ms", "soon"], "--deadline-ms: 'soon' is not a valid integer"),
        (["engines", "ensure"], "Choose from: triton, vllm, llamacpp; see"),
        (["swap", "10.0.0.7:8001"], "Missing argument 'MODEL'; see"),
        ([], 'tidegate chat "Tell me a story."'),
    ],
)
def test_wrong_usage_names_what_was_wrong(argv: list[str], message: str, cli: Cli) -> None:
    assert message in cli(*argv, status=2).err


@pytest.mark.parametrize(
    ("module", "early"), [("aiohttp.web", True), ("orchestrator.settings", False)]
)
def test_ctrl_c_while_the_orchestrator_is_imported(module: str, early: bool) -> None:
    """Also when it came before there was a Python to take it."""
    program = f"""if True:
        import os, runpy, signal, sys

        class Interrupted:
            def find_spec(self, name, *_):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)
                    for _ in range(1000): pass

        signal.signal(signal.SIGINT, signal.default_int_handler)
        if {early}:
            signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})
            os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupted())
        sys.modules.pop("orchestrator.__main__", None)
        runpy.run_module("orchestrator", run_name="__main__")
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=110)
    assert (ended.returncode, ended.stdout, ended.stderr) == (INTERRUPTED, b"", b"")


def test_serve_becomes_the_orchestrator(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[list[str]] = []
    paths: list[str] = []
    masks: list[set[int]] = []

    def execve(path: str, argv: list[str], env: dict[str, str]) -> None:
        executed.append(argv)
        paths.append(env["PYTHONPATH"])
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("PYTHONPATH", "/ours")
    main(["serve", "--port", "9000", "--instances-at", "a:1,b:2", "--cors-origins", "*"])
    assert signal.SIGINT in masks[0]  # until the orchestrator can handle it
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    options = ["--port", "9000", "--instances", "a:1,b:2", "--cors-origins", "*"]
    assert executed == [[sys.executable, "-P", "-m", "orchestrator", *options]]
    assert paths == [f"{ROOT}{os.pathsep}/ours"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_and_answers(
    shell: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TIDEGATE_COMPLETE", f"{shell}_source")
    assert f"_TIDEGATE_COMPLETE={shell}_complete" in cli().out
    monkeypatch.setenv("_TIDEGATE_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "tidegate mod" if shell != "fish" else "tidegate ")
    monkeypatch.setenv("COMP_CWORD", "1" if shell != "fish" else "mod")
    assert "models" in cli().out
