"""Logits against transformers, and against ourselves however a text is cut up or batched."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import LLAMA3_ROPE, ROPE, YARN, edit_config, make_checkpoint
from tests.support.lazy import transformers
from tests.support.model import Rig
from tests.support.real_weights import smollm2

VARIANTS: dict[str, dict[str, object]] = {
    "llama-gqa-untied": {},
    "llama-mha-tied": {"num_key_value_heads": 6, "tie_word_embeddings": True},
    "llama-mqa-wide-heads": {"num_key_value_heads": 1, "head_dim": 16},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "llama-linear-rope": {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 3.0}},
    "llama-dynamic-rope": {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 3.0}},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 10},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-yarn": {"model_type": "qwen2", "rope_parameters": YARN},
    "qwen2-yarn-mscale": {
        "model_type": "qwen2",
        "rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False},
    },
    "mistral-yarn-of-its-own": {
        "model_type": "mistral",
        "sliding_window": None,
        "rope_parameters": YARN | {"attention_factor": 0.7, "beta_fast": 9.0, "beta_slow": 2.0},
    },
    "qwen2-upper-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 9, "num_hidden_layers": 6}
    | dict.fromkeys(("head_dim", "query_pre_attn_scalar"), 16),
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-tied-mixed-windows": {
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def random_ids(count: int, vocabulary: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (count,), generator=generator).tolist()


def oracle(path: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


@pytest.fixture(scope="module", params=VARIANTS, ids=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), **VARIANTS[request.param])


def test_logits_are_those_of_transformers(checkpoint: Path) -> None:
    """A chunk of the prompt, decodes, another chunk; pages in no order."""
    ids = random_ids(100, 300)
    rig = Rig(checkpoint)
    text = rig.text(ids)
    logits = torch.cat([rig.step((text, n))[0] for n in (60, *[1] * 15, 25)])
    torch.testing.assert_close(logits, oracle(checkpoint, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["llama-gqa-untied", "llama3-rope", "mistral-window", "qwen2-yarn-mscale", "qwen3"]
)
def test_a_short_type_is_as_near_as_transformers_is(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    is_as_near(make_checkpoint(tmp_path, **VARIANTS[name]), dtype)


@pytest.mark.slow
def test_real_weights_in_bfloat16_are_as_near_as_transformers() -> None:
    is_as_near(smollm2(), torch.bfloat16)


def is_as_near(checkpoint: Path, dtype: torch.dtype) -> None:
    """Root mean square error against float32, ours at most a tenth above theirs."""
    ids = random_ids(100, 300)
    exact = oracle(checkpoint, ids)
    rig = Rig(checkpoint, dtype=dtype)
    text = rig.text(ids)
    logits = torch.cat([rig.step((text, n))[0] for n in (60, *[1] * 15, 25)])

    def error(found: torch.Tensor) -> float:
        return float((found - exact).square().mean().sqrt())

    assert error(logits) < 1.1 * error(oracle(checkpoint, ids, dtype))


QWEN_README = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": QWEN_README},
        {"rope_scaling": QWEN_README | ROPE},
        {"rope_scaling": QWEN_README, "rope_theta": 500.0},
        {"rope_parameters": None, "rope_scaling": QWEN_README, "rope_theta": 500.0},
        {"rope_parameters": YARN, "rope_scaling": {}},
        {"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
    ids=["added", "added-with-theta", "theta-on-top", "transformers-4", "empty", "other-kind"],
)
def test_a_rope_scaling_that_was_added_counts_as_in_transformers(
    tmp_path: Path, rope: dict[str, object]
) -> None:
    """Beside the ``rope_parameters`` that transformers 5 writes."""
    make_checkpoint(tmp_path, "qwen2", rope_parameters=ROPE | {"rope_type": "default"})
    edit_config(tmp_path, **rope)
    ids = random_ids(100, 300)
    rig = Rig(tmp_path)
    (logits,) = rig.step((rig.text(ids), len(ids)))
    torch.testing.assert_close(logits, oracle(tmp_path, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("stored", ["copy", "another", "none"])
def test_a_tied_head_that_is_stored_counts_as_in_transformers(
    tmp_path: Path, stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = weights.pop("lm_head.weight")
    if stored != "none":
        copy = weights["model.embed_tokens.weight"].clone()
        weights["lm_head.weight"] = head if stored == "another" else copy
    save_file(weights, file, metadata={"format": "pt"})
    edit_config(tmp_path, tie_word_embeddings=True)
    ids = random_ids(50, 300)
    rig = Rig(tmp_path)
    (logits,) = rig.step((rig.text(ids), len(ids)))
    torch.testing.assert_close(logits, oracle(tmp_path, ids), atol=1e-4, rtol=0)
    assert ("they differ" in caplog.text) == (stored == "another")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_logits_on_cuda(tiny: Path) -> None:
    ids = random_ids(60, 300)
    rig = Rig(tiny, torch.device("cuda"))
    text = rig.text(ids)
    logits = torch.cat([rig.step((text, n))[0] for n in (40, 1, 19)])
    torch.testing.assert_close(logits, oracle(tiny, ids), atol=1e-3, rtol=0)
