"""Folders that are no checkpoint say what they are; what a model is called."""

from pathlib import Path

import pytest

from tests.support.checkpoints import DEMO
from worker.engine.build import build_engine
from worker.errors import BrokenCheckpoint
from worker.models.config import read_config
from worker.models.folder import model_name, why_unservable
from worker.settings import WorkerSettings

CONFIG = (DEMO / "config.json").read_text()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"in pytorch_model\.bin only.*safetensors: convert"),
        (
            ["config.json", *(f"pytorch_model-{i}-of-3.bin" for i in (1, 2, 3))],
            "pytorch_model-1-of-3.bin, pytorch_model-2-of-3.bin and 1 more only",
        ),
        (["params.json", "consolidated.00.pth"], r"config\.json is missing.*for transformers"),
        (["adapter_config.json", "adapter_model.safetensors"], "is a LoRA adapter.*merge"),
        (["config.json", "adapter_config.json", "adapter_model.bin"], "is a LoRA adapter"),
        (["model-Q4_K_M.gguf", "README.md"], r"\(model-Q4_K_M\.gguf\) is in GGUF.*original"),
        (["config.json", "model-Q4_K_M.gguf"], "is in GGUF"),
        (["config.json", "model-00001-of-00002.safetensors"], "index.json"),
        (["config.json"], r"model\.safetensors is missing; the download"),
        (["config.json", "training_args.bin"], r"model\.safetensors is missing; the download"),
        ([], r"config\.json is missing; point the model path at a checkpoint directory"),
    ],
)
def test_a_folder_without_weights_says_what_it_is(
    tmp_path: Path, files: list[str], message: str
) -> None:
    for name in files:
        (tmp_path / name).write_text(CONFIG if name == "config.json" else "{}")
    # Before the tokenizer, which is missing here too.
    with pytest.raises(BrokenCheckpoint, match=message):
        build_engine(WorkerSettings(model_path=tmp_path, device="cpu"))


def test_a_path_that_is_no_folder_says_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "llama-Q8_0.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(BrokenCheckpoint, match="is in GGUF"):
        read_config(file)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    with pytest.raises(BrokenCheckpoint, match="is a file; point the model path at the directory"):
        read_config(weights)
    with pytest.raises(BrokenCheckpoint, match="does not exist"):
        read_config(tmp_path / "nothing")


def test_a_merged_model_next_to_its_adapter_is_a_model(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "adapter_config.json", "model.gguf"):
        (tmp_path / name).touch()
    assert why_unservable(tmp_path) is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (
            "models--Qwen--Qwen2.5-0.5B-Instruct/snapshots/7ae557604adf",
            "Qwen/Qwen2.5-0.5B-Instruct",
        ),
        ("models--gpt2/snapshots/607a30d783df", "gpt2"),
        ("checkpoints/llama", "llama"),
        ("datasets--a--b/snapshots/1234", "1234"),
        ("models--a--b/other/1234", "1234"),
    ],
)
def test_a_snapshot_in_a_cache_has_its_repository_s_name(
    tmp_path: Path, path: str, name: str
) -> None:
    folder = tmp_path / path
    folder.mkdir(parents=True)
    assert model_name(folder) == name
    (tmp_path / "link").symlink_to(folder)
    assert model_name(tmp_path / "link") == name


def test_a_cache_s_repository_names_its_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b"
    (folder / "snapshots" / "123").mkdir(parents=True)
    with pytest.raises(BrokenCheckpoint, match=r"point the model path at .*/snapshots/123"):
        read_config(folder)
