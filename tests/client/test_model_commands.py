"""``tidegate models add`` and its kin, on this machine's catalog."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from catalog.models import ModelCatalog
from catalog.paths import DEMO_CHECKPOINT
from tests.client.conftest import Cli, Launched
from tests.pool.artifacts.test_staging_local import make_folder
from tests.support import fake_llamacpp
from tests.support.model_files import checkpoint, gguf
from tests.support.to_gguf import convert
from tidegate.cli.main import main
from tidegate.cli.models import list_models


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COLUMNS", raising=False)
    half_free = SimpleNamespace(total=2**40, used=2**39, free=2**39)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: half_free)
    return tmp_path / "home"


def run(*argv: str) -> int:
    return main(["models", *argv])


def test_a_model_is_added_listed_shown_verified_loaded_and_removed(
    home: Path, tmp_path: Path, cli: Cli
) -> None:
    source = make_folder(tmp_path / "mine", checkpoint(5000))
    out, err = cli("models", "add", str(source), "--keep-free", "0", "--copy", "--load")
    assert f"{source}: safetensors, 4 files, 5.1 kB, license apache-2.0" in err
    assert "mine: 5.1 kB, safetensors, license apache-2.0" in out
    assert "tidegate up --model mine" in out

    header, line = cli("models", "list").out.splitlines()
    assert header.split()[:3] == ["MODEL", "STATE", "FORMAT"]
    assert line.split()[:5] == ["mine", "active", "safetensors", "5.1", "kB"]

    assert "model.safetensors" in cli("models", "show", "mine").out
    shown = json.loads(cli("models", "show", "mine", "--json").out)
    assert (shown["name"], shown["state"], shown["license"]) == ("mine", "active", "apache-2.0")

    assert cli("models", "load", "mine").out == "mine: in memory\n"
    assert cli("models", "verify").out == "mine: no byte has changed\n"
    config = Path(shown["path"]) / "config.json"
    config.write_bytes(config.read_bytes()[:-1] + b" ")
    assert "config.json has changed" in cli("models", "verify", "mine", status=1).out

    assert cli("models", "remove", "mine").out == "removed mine (5.1 kB)\n"
    assert ModelCatalog(home).entries() == ()


def test_up_takes_a_model_by_its_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, launched: Launched
) -> None:
    monkeypatch.chdir(tmp_path)
    source = make_folder(tmp_path / "source", checkpoint(5000))
    assert run("add", str(source), "--keep-free", "0", "--name", "mine") == 0
    assert main(["up", "--model", "mine"]) == 0
    catalog = ModelCatalog(home)
    assert launched[0][0].worker_env["TIDEGATE_WORKER__MODEL_NAME"] == "mine"
    path = launched[0][0].worker_env["TIDEGATE_WORKER__MODEL_PATH"]
    assert path == str(catalog.servable_path(catalog.get("mine")))

    config = Path(path) / "config.json"
    config.write_bytes(b"{}")
    cli("models", "verify", status=1)
    assert "is broken (config.json has" in cli("up", "--model", "mine", status=1).err
    assert len(launched) == 1


def test_up_runs_a_gguf_model_by_the_server_that_reads_it(
    home: Path, tmp_path: Path, launched: Launched, cli: Cli
) -> None:
    make_folder(tmp_path, {"tiny.gguf": gguf()})
    added = cli("models", "add", str(tmp_path / "tiny.gguf"), "--keep-free", "0")
    assert "only models of llama, qwen2, qwen3" in added.err
    refused = cli("up", "--model", "tiny", status=1)
    assert "not installed here: tidegate engines ensure llamacpp" in refused.err
    fake_llamacpp.install(home)
    assert "use tidegate up" in cli("worker", "--model", "tiny", status=1).err
    assert main(["up", "--model", "tiny"]) == 0
    assert main(["up", "--model", str(tmp_path / "tiny.gguf")]) == 0
    for spec, _ in launched:
        assert spec.runs_gguf
        assert spec.worker_env["TIDEGATE_WORKER__MODEL_PATH"].endswith("tiny.gguf")
    assert main(["up", "--model", str(tmp_path / "tiny.gguf"), "--engine", "torch"]) == 1


def test_up_reads_a_gguf_model_into_our_own_engine(
    home: Path, tmp_path: Path, launched: Launched
) -> None:
    file = tmp_path / "demo-q8.gguf"
    convert(DEMO_CHECKPOINT, file, "q8_0")
    model = str(file)
    fake_llamacpp.install(home)
    for more in ([], [], ["--engine", "llamacpp"]):
        assert main(["up", "--model", model, *more]) == 0
    (entry,) = ModelCatalog(home).entries()
    paths = [Path(spec.worker_env["TIDEGATE_WORKER__MODEL_PATH"]) for spec, _ in launched]
    assert paths[:2] == [ModelCatalog(home).servable_path(entry)] * 2
    assert [spec.runs_gguf for spec, _ in launched] == [False, False, True]
    assert paths[2].suffix == ".gguf" and paths[2].is_file()
    assert launched[0][0].worker_env["TIDEGATE_WORKER__MODEL_NAME"] == file.stem


def test_up_deals_out_gpus_by_groups(home: Path, cli: Cli, launched: Launched) -> None:
    assert main(["up", "--tensor-parallel", "2", "--gpus", "0,1,2,3", "--instances", "2"]) == 0
    assert launched[0][0].worker_env["TIDEGATE_WORKER__TENSOR_PARALLEL"] == "2"
    assert (launched[0][0].gpus, launched[0][0].gpus_each) == (("0", "1", "2", "3"), 2)
    refused = cli("up", "--tensor-parallel", "2", "--gpus", "0,1,2", status=1)
    assert "names 3 GPUs, but each instance takes 2" in refused.err


def test_up_gives_the_answers_of_a_script(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, launched: Launched
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("[[answers]]\ntext = 'Yes.'\n")
    assert main(["up", "--model", "scripted"]) == 0
    assert main(["up", "--model", "mine.toml", "--model-name", "gpt-x"]) == 0
    scripts = (("scripted", None), ("gpt-x", str(tmp_path / "mine.toml")))
    for (spec, _), (name, script) in zip(launched, scripts, strict=True):
        assert spec.worker_env["TIDEGATE_WORKER__ENGINE"] == "synthetic-scripted"
        assert spec.worker_env["TIDEGATE_WORKER__MODEL_PATH"] == str(DEMO_CHECKPOINT)
        assert spec.worker_env["TIDEGATE_WORKER__MODEL_NAME"] == name
        told = spec.worker_env.get("TIDEGATE_WORKER__ENGINE_ARGS")
        assert told == (json.dumps({"script": script}) if script else None)
    (tmp_path / "mine.toml").write_text("[[answers]]\n")
    assert "answers[0] says nothing" in cli("up", "--model", "mine.toml", status=1).err
    assert "[default: 8; x>=1]" in cli("models", "add", "--help").out
    assert '""' not in cli("models", "add", "--help").out
    assert (
        "does not exist; --model takes"
        in cli("up", "--model", str(tmp_path / "scripted"), status=1).err
    )
    assert len(launched) == 2


def test_a_reader_that_stops_early_is_left_to_main(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ends without a message: ``tidegate models list | head``."""

    def print_to_nobody(_: ModelCatalog) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(ModelCatalog, "entries", print_to_nobody)
    with pytest.raises(BrokenPipeError):
        list_models.main([], standalone_mode=False)
