"""What an instance will take, from its files (PV-2)."""

import json
from pathlib import Path

import pytest

from catalog.paths import DEMO_CHECKPOINT
from pool.preflight.need import GIB, need_of

SHAPE = {
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 1000,
}


def checkpoint(path: Path, size: int = 1000, **config: object) -> Path:
    (path / "config.json").write_text(json.dumps(SHAPE | config))
    (path / "model.safetensors").write_bytes(bytes(size))
    return path


def test_weights_are_the_files_in_the_type_that_is_computed_in(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    (model / "pytorch_model.bin").write_bytes(bytes(5000))  # the same weights once more
    for dtype, size in (("auto", 1000), ("bfloat16", 1000), ("float32", 2000)):
        assert need_of(model, {"dtype": dtype}, on_gpu=True).weights == size
    assert need_of(model, {"quantize": "int8"}, on_gpu=False).weights == 500


def test_kv_is_one_context_or_what_is_asked_for(tmp_path: Path) -> None:
    model, per_token = checkpoint(tmp_path), 2 * 2 * 2 * 8 * 2
    assert need_of(model, {}, on_gpu=True).kv == 1000 * per_token
    assert need_of(model, {"kv.blocks": 7}, on_gpu=True).kv == 7 * 16 * per_token


def test_a_text_models_shape_may_be_one_level_deeper(tmp_path: Path) -> None:
    flat = need_of(checkpoint(tmp_path), {}, on_gpu=True).kv
    (tmp_path / "config.json").write_text(json.dumps({"text_config": SHAPE}))
    assert need_of(tmp_path, {}, on_gpu=True).kv == flat


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"hidden_size": "many"}'])
def test_without_a_shape_kv_is_a_share_of_the_weights(tmp_path: Path, config: str) -> None:
    model = checkpoint(tmp_path)
    (model / "config.json").write_text(config)
    assert need_of(model, {}, on_gpu=True).kv == 100


def test_a_gguf_file_is_as_large_as_it_is(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(1000))
    assert need_of(model, {"dtype": "float32"}, on_gpu=True).weights == 1000


def test_cuda_comes_on_top_and_made_up_tokens_need_no_weights() -> None:
    demo = need_of(DEMO_CHECKPOINT, {}, on_gpu=True)
    assert GIB // 2 < demo.total < GIB
    assert need_of(DEMO_CHECKPOINT, {"engine": "synthetic-free"}, on_gpu=False).weights == 0
