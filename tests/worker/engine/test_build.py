import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.support.checkpoints import DEMO, edit_config
from worker.engine.build import build_engine
from worker.environment import nested
from worker.errors import TokenizerError
from worker.models.config import read_config
from worker.runner import build as torch_build
from worker.runner import device as precision
from worker.runner.memory import ProcessMemory
from worker.settings import SHARED_BY, WorkerSettings


def settings(path: Path, **changes: object) -> WorkerSettings:
    return WorkerSettings(model_path=path, **nested({"device": "cpu"} | changes))


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure the backends takes seconds at each start."""
    monkeypatch.setattr("worker.runner.build.ATTENTION", "reference")


def test_the_demo_model_s_card() -> None:
    card = build_engine(settings(DEMO, model_name="demo", max_running=3)).card
    assert (card.model, card.device, card.engine, card.max_running) == ("demo", "cpu", "torch", 3)
    assert card.context_tokens >= 2048
    assert card.vocab_size == json.loads((DEMO / "config.json").read_text())["vocab_size"]
    assert card.tokenizer_json == (DEMO / "tokenizer.json").read_bytes()
    assert "<|assistant|>" in card.chat_template
    assert card.special_tokens["bos_token"] == "<|bos|>"
    assert card.bos_token_id == 0
    assert set(card.eos_token_ids) == {1, 5}
    for digest in (card.engine_digest, card.model_digest):
        assert len(bytes.fromhex(digest)) == hashlib.sha256().digest_size
    assert card.hash_salt == bytes.fromhex(card.model_digest)


def test_digests_follow_what_changes_results(tiny: Path) -> None:
    """PF-6."""
    card = build_engine(settings(tiny)).card
    assert card.model == tiny.name, "where the settings name none"
    patient = build_engine(settings(tiny, min_start_budget_ms=7)).card
    assert patient == replace(card, min_start_budget_ms=7)
    other = build_engine(settings(tiny, dtype="bfloat16")).card
    assert other.engine_digest != card.engine_digest
    assert other.model_digest == card.model_digest


def test_the_pool_is_sized_by_need_and_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(**changes: object) -> int:
        values = {"max_running": 4} | changes
        return build_engine(settings(tiny, **values)).engine.stats().kv_blocks_total

    block_bytes, context = 3 * 16 * 2 * 2 * 8 * 4, 128 // 16
    assert blocks() == 4 * context
    assert blocks(kv__blocks=5) == 5

    def free(blocks: int) -> None:
        monkeypatch.setattr(ProcessMemory, "free_bytes", lambda self: blocks * block_bytes)

    free(10**6)
    assert blocks() == 4 * context, "no more than slots and context can use"
    free(4 * 19)
    assert blocks() == 19, "a quarter of what is free"
    free(2 * context)
    assert blocks() == context, "half of it for one whole context"
    with monkeypatch.context() as patch:
        patch.setenv(SHARED_BY, "4")
        assert blocks() == context // 2
    free(2 * 3)
    assert blocks() == 3
    free(0)
    with pytest.raises(MemoryError, match=r"no memory is left.*KV__BLOCKS"):
        blocks()


def test_a_pool_that_is_shorter_than_the_context_says_what_to_set(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ProcessMemory, "free_bytes", lambda self: 2 * 3 * 16 * 3 * 2 * 2 * 8 * 4)
    card = build_engine(settings(tiny)).card
    assert (card.context_tokens, card.full_context_tokens) == (48, 128)
    assert "the KV pool holds 48 tokens, less than the model's context of 128" in caplog.text
    assert "set TIDEGATE_WORKER__KV__BLOCKS=8" in caplog.text
    assert "own context is 128" in card.context_note and "KV__BLOCKS" in card.context_note
    caplog.clear()
    whole = build_engine(settings(tiny, kv__blocks=8)).card
    assert whole.context_tokens == 128 and not whole.context_note
    assert "KV pool holds" not in caplog.text


def test_a_pool_that_does_not_fit_is_refused(tiny: Path) -> None:
    with pytest.raises(MemoryError, match=r"does not fit on cpu.*KV__BLOCKS"):
        build_engine(settings(tiny, kv__blocks=10**12))


def test_a_tokenizers_errors_come_through(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        build_engine(settings(copy))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        build_engine(settings(copy))


def test_auto_is_bfloat16_on_the_cpu_where_that_is_fast(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(tiny, dtype="bfloat16")
    config = read_config(tiny)
    edit_config(tiny, dtype="float32")

    def chosen(**changes: object) -> torch.dtype:
        return precision.choose_dtype(settings(tiny, **changes), config, torch.device("cpu"))

    monkeypatch.setattr(precision, "has_bfloat16", lambda: False)
    monkeypatch.setattr(precision, "blocks_fit", lambda dtype: True)
    assert chosen() is torch.bfloat16, "our products widen it, or AMX multiplies it"
    monkeypatch.setattr(precision, "blocks_fit", lambda dtype: False)
    assert chosen() is torch.float32, "it does not compile"
    monkeypatch.setattr(precision, "has_bfloat16", lambda: True)
    assert chosen() is torch.float32, "for a small model oneDNN's calls cost more than it gains"
    monkeypatch.setattr(precision, "SMALL_BYTES", 0)
    assert chosen() is torch.bfloat16
    assert chosen(dtype="float32") is torch.float32
    monkeypatch.setattr(precision, "has_bfloat16", lambda: False)
    assert chosen() is torch.float32
    monkeypatch.setattr(precision, "blocks_fit", lambda dtype: True)
    assert chosen() is torch.bfloat16


def test_every_phase_of_the_start_is_timed(tiny: Path) -> None:
    """LB-6."""
    phases = build_engine(settings(tiny)).load_ms
    assert {"tokenizer", "cpu_init", "model_load", "kv_pool", "digest", "total"} <= phases.keys()
    assert all(0 <= ms <= phases["total"] for ms in phases.values())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv__prefix_cache": False, "kv__disk_path": "/kv"}, "KV__DISK_PATH"),
        ({"max_step_tokens": 4, "max_running": 8}, "max_step_tokens"),
    ],
)
def test_settings_that_would_be_ignored_are_refused_before_anything_is_loaded(
    tiny: Path, changes: dict[str, object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*_: object) -> None:
        raise AssertionError("it loads already")

    monkeypatch.setattr(torch_build, "build_torch_runner", loads)
    with pytest.raises(ValueError, match=named):
        build_engine(settings(tiny, **changes))
