"""``TIDEGATE_WORKER__ENGINE_ARGS``: an engine's own settings, as an operator may write them."""

import pytest

from tests.support.cases import for_each
from worker.settings import read_engine_args, read_settings


@for_each(
    "text",
    [
        "max_num_seqs=8 dtype='float32'",
        " --max-num-seqs=8   --dtype=float32 ",
        '{"max-num-seqs": 8, "dtype": "float32"}',
    ],
)
def test_the_same_settings_in_every_spelling(text: str) -> None:
    assert read_engine_args(text) == {"max_num_seqs": "8", "dtype": "float32"}


def test_json_values_stay_what_they_are() -> None:
    text = '{"enforce_eager": true, "hf_overrides": {"rope_theta": 1e6}, "seed": null}'
    assert read_engine_args(text) == {
        "enforce_eager": "true",
        "hf_overrides": '{"rope_theta": 1000000.0}',
        "seed": "null",
    }


def test_a_value_may_hold_commas_equals_signs_and_quoted_blanks() -> None:
    said = read_engine_args("cores=0,2-3 tensor_split='1 2' overrides=a=b empty=")
    assert said == {"cores": "0,2-3", "tensor_split": "1 2", "overrides": "a=b", "empty": ""}


@for_each(
    ("text", "says"),
    [
        ("max_num_seqs", "'max_num_seqs' is no pair"),
        ("=8", "'=8' is no pair"),
        ('{"a": 1', "is not valid JSON"),
        ("a-b=1 a_b=2", "a_b is given twice"),
        ("a='1", "No closing quotation"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_engine_args(text)


def test_the_environment_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_WORKER__MODEL_PATH", "/models/m")
    monkeypatch.setenv("TIDEGATE_WORKER__ENGINE_ARGS", "n_gpu_layers=0")
    assert read_settings().engine_args == {"n_gpu_layers": "0"}
    monkeypatch.setenv("TIDEGATE_WORKER__ENGINE_ARGS", "n_gpu_layers")
    with pytest.raises(ValueError, match=r"ENGINE_ARGS.*is no pair"):
        read_settings()
