"""Checkpoints that cannot be served say what is wrong with them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.model_digest import model_digest
from tests.support.checkpoints import LLAMA3_ROPE, YARN, edit_config, make_checkpoint
from tests.support.model import CPU, Rig
from worker.errors import BrokenCheckpoint, UnsupportedModel
from worker.models.config import read_config
from worker.models.model import load_model
from worker.models.rope_scaling import Llama3Scaling


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path


def load(path: Path) -> None:
    load_model(path, read_config(path), torch.float32, CPU)


def weights_file(path: Path) -> Path:
    return path / "model.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'.*runs Gemma3.*Llama"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'.*'llama3'"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "attention_bias=True"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "each kind of layer"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types="),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 3},
            "'chunked_attention'.*sliding_attention",
        ),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn.*bfloat16"),
    ],
)
def test_what_we_do_not_run_is_named(
    checkpoint: Path, change: dict[str, object], message: str
) -> None:
    edit_config(checkpoint, **change)
    with pytest.raises(UnsupportedModel, match=message):
        load(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        ({"num_key_value_heads": 4}, "must be a multiple of"),
        ({"eos_token_id": [2, 300]}, r"eos_token_id \[2, 300\] is outside the vocabulary of 300"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id or a list of them, got '2'"),
        ({"bos_token_id": [0, None]}, "bos_token_id must be a token id or a list"),
        ({"architectures": None}, "architectures must name one model class"),
        ({"vocab_size": 301}, r"embed_tokens.weight is \[300, 48\], expected \[301, 48\]"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 3},
            "give it no window",
        ),
        ({"architectures": ["Qwen2ForCausalLM"]}, "lack 9 tensors .model.layers.0.*q_proj.bias"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "lack 6 tensors .model.layers.0.*q_norm.weight"),
        ({"num_hidden_layers": 4}, "lack 9 tensors .model.layers.3"),
        ({"num_hidden_layers": 2}, "have unknown 9 tensors .model.layers.2"),
    ],
)
def test_what_does_not_fit_is_named(
    checkpoint: Path, change: dict[str, object], message: str
) -> None:
    edit_config(checkpoint, **change)
    (checkpoint / "generation_config.json").unlink()
    with pytest.raises(BrokenCheckpoint, match=message):
        load(checkpoint)


@pytest.mark.parametrize("keep", [0, 5, 500, -100])
def test_a_cut_off_weights_file_is_named(checkpoint: Path, keep: int) -> None:
    file = weights_file(checkpoint)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(BrokenCheckpoint, match=r"model\.safetensors is corrupt or cut short"):
        load(checkpoint)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_an_unreadable_config_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BrokenCheckpoint, match=r"config\.json"):
        load(checkpoint)


def shard(path: Path) -> list[Path]:
    """Split the weights over two files with an index, as large checkpoints are."""
    weights = load_file(weights_file(path))
    weights_file(path).unlink()
    names = sorted(weights)
    shards = {"model-1.safetensors": names[:10], "model-2.safetensors": names[10:]}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, path / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return [path / file for file in shards]


def test_shards_are_one_model(original: Path, checkpoint: Path) -> None:
    shard(checkpoint)
    ids = list(range(3, 30))
    logits = []
    for path in (original, checkpoint):
        rig = Rig(path)
        logits.append(rig.step((rig.text(ids), len(ids)))[0])
    # Weights that lie elsewhere in memory may be summed in another order.
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    shard(checkpoint)[1].unlink()
    with pytest.raises(BrokenCheckpoint, match=r"model-2\.safetensors is missing"):
        load(checkpoint)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE},
        {
            "rope_theta": 500.0,
            "rope_scaling": {"type": "llama3"}
            | {k: v for k, v in LLAMA3_ROPE.items() if k not in ("rope_type", "rope_theta")},
        },
    ],
    ids=["transformers-5", "transformers-4", "oldest"],
)
def test_rope_settings_of_every_age(checkpoint: Path, settings: dict[str, object]) -> None:
    edit_config(checkpoint, **({"rope_parameters": None} | settings))
    config = read_config(checkpoint)
    assert config.rope_theta == 500.0
    assert config.rope_scaling == Llama3Scaling(4.0, 1.0, 4.0, 32)


def test_a_rope_theta_that_is_lost_is_told(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(
        checkpoint,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )
    assert read_config(checkpoint).rope_theta == 10000.0
    assert "the latter counts alone" in caplog.text
    assert "rope_theta of 1000000.0 in rope_parameters is not used" in caplog.text


def test_the_digest_follows_the_contents(original: Path, checkpoint: Path) -> None:
    digest = model_digest(original)
    assert digest == model_digest(checkpoint)
    file = weights_file(checkpoint)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert model_digest(checkpoint) != digest


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 3),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, (64,) * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}, (0,) * 3),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
            (0,) * 3,  # max_window_layers is 28 when nothing is said
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            (0, 0, 4096),
        ),
    ],
)
def test_windows_have_the_defaults_of_transformers(
    checkpoint: Path, change: dict[str, object], windows: tuple[int, ...]
) -> None:
    edit_config(checkpoint, **change)
    assert read_config(checkpoint).windows == windows


def test_yarn_stretches_the_context_once(checkpoint: Path) -> None:
    edit_config(checkpoint, rope_parameters=YARN)
    assert read_config(checkpoint).context_tokens == 128
    edit_config(checkpoint, max_position_embeddings=32)
    assert read_config(checkpoint).context_tokens == 128
