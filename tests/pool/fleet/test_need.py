"""What an instance will take, from its files (PV-2)."""

import json
from pathlib import Path

import pytest

from catalog.paths import DEMO_CHECKPOINT
from pool.fleet.gpus import GIB, need_bytes
from pool.fleet.specs import InstanceSpec
from worker.settings import variable

SHAPE = {
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 1000,
}
PER_TOKEN = 2 * 2 * 2 * 8 * 2


def need_of(path: Path, **settings: str) -> int:
    told = {variable(name.replace("__", ".")): value for name, value in settings.items()}
    return need_bytes(InstanceSpec("a", str(path), (("0",),), told), path)


def need(path: Path, size: int = 0, **settings: str) -> int:
    """Without what CUDA takes."""
    (path / "model.safetensors").write_bytes(bytes(size))
    return need_of(path, **settings) - GIB // 2


def test_weights_are_the_files_in_the_type_that_is_computed_in(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(5000))  # the same weights once more
    for dtype, size in (("auto", 1050), ("bfloat16", 1050)):
        assert need(tmp_path, 1000, dtype=dtype) - need(tmp_path, dtype=dtype) == size
    wide = need(tmp_path, 1000, dtype="float32") - need(tmp_path, dtype="float32")
    assert wide == 2100


@pytest.mark.parametrize("wrap", [lambda shape: shape, lambda shape: {"text_config": shape}])
def test_kv_is_one_context_or_what_is_asked_for(tmp_path: Path, wrap: object) -> None:
    assert callable(wrap)
    (tmp_path / "config.json").write_text(json.dumps(wrap(SHAPE)))
    assert need(tmp_path) == 1000 * PER_TOKEN
    assert need(tmp_path, kv__blocks="7") == 7 * 16 * PER_TOKEN


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"hidden_size": "many"}'])
def test_without_a_shape_kv_is_a_share_of_the_weights(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert need(tmp_path, 1000) == 1000 + 100 + 50


def test_other_kinds_of_models(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(1000))
    assert need_of(model, dtype="float32") == 1150 + GIB // 2, "as it is"
    assert GIB // 2 < need_of(DEMO_CHECKPOINT) < GIB
    assert need_of(DEMO_CHECKPOINT, engine="synthetic-free") == GIB // 4
