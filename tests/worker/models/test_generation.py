"""What ``generation_config.json`` says about sampling."""

import json
import shutil
from pathlib import Path

import pytest

from protocol import SamplingDefaults
from tests.support.checkpoints import make_checkpoint
from worker.engine.build import build_engine
from worker.engine.card import read_sampling_defaults
from worker.errors import BrokenCheckpoint
from worker.settings import WorkerSettings

QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.37.0",
}


def write(path: Path, **said: object) -> Path:
    (path / "generation_config.json").write_text(json.dumps(said))
    return path


def test_as_qwen_has_it(tmp_path: Path) -> None:
    assert read_sampling_defaults(write(tmp_path, **QWEN)) == SamplingDefaults(
        temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05
    )
    said = write(tmp_path, min_p=0.1, max_new_tokens=512, temperature=None, num_beams=4)
    assert read_sampling_defaults(said) == SamplingDefaults(min_p=0.1, max_tokens=512)


@pytest.mark.parametrize(
    "said",
    [
        {"temperature": -1},
        {"temperature": "0.7"},
        {"temperature": True},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": 20.5},
        {"top_k": -7},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
    ],
)
def test_what_does_not_fit_is_told_and_left_out(
    tmp_path: Path, said: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    found = read_sampling_defaults(write(tmp_path, **{"min_p": 0.1} | said))
    assert found == SamplingDefaults(min_p=0.1)
    assert f"{next(iter(said))}=" in caplog.text


def test_a_broken_file_stops_the_load(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(BrokenCheckpoint, match=r"generation_config\.json must hold"):
        read_sampling_defaults(tmp_path)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path


def card(path: Path, **changes: object):  # type: ignore[no-untyped-def]
    return build_engine(
        WorkerSettings(model_path=path, engine="synthetic-free", **changes)  # type: ignore[arg-type]
    ).card


def test_the_card_carries_them_unless_they_are_turned_off(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write(tiny, temperature=0.6, eos_token_id=[2, 7])
    assert card(tiny).sampling_defaults == SamplingDefaults(temperature=0.6)
    assert "generation_config.json (temperature 0.6)" in caplog.text


@pytest.mark.parametrize(
    ("generation", "eos_token", "expected"),
    [
        ([2, 7], None, (2, 7)),
        ([2, 7], "Ġfox", (2, 7, 260)),
        (260, {"content": "Ġfox"}, (260,)),
        (None, "Ġfox", (2, 260)),
        ([7, 7], "<nothing like it>", (7,)),
    ],
)
def test_the_model_s_end_tokens_and_the_tokenizer_s_all_end_an_answer(
    tiny: Path, generation: object, eos_token: object, expected: tuple[int, ...]
) -> None:
    """As in vLLM. The model's: of generation_config.json, else of config.json."""
    write(tiny, **({} if generation is None else {"eos_token_id": generation}))
    (tiny / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    assert card(tiny).eos_token_ids == expected


def test_an_end_token_beyond_the_vocabulary_is_told_and_left_out(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would fail every step that bars it (``min_tokens``)."""
    write(tiny, eos_token_id=2)
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [{"id": 300, "content": "<|end|>", "special": True, **flags}]
    tokenizer["model"]["vocab"] |= {f"x{i}": i for i in [0, 1, 2, *range(262, 300)]}
    (tiny / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tiny / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    assert card(tiny).eos_token_ids == (2,)
    assert "has id 300, outside the model's vocabulary of 300 tokens" in caplog.text
