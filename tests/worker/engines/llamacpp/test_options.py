"""Settings of llama.cpp by its own names."""

from pathlib import Path

import pytest

from worker.engines.llamacpp.options import CACHE_TYPES, CELL_BYTES, Options, read_options


def test_nothing_stated_leaves_everything_as_it_is() -> None:
    assert read_options({}) == Options()


def test_every_kind_of_value_is_read() -> None:
    stated = {
        "n_gpu_layers": "-1",
        "threads": "4",
        "flash_attn": "ON",
        "type_k": "q8_0",
        "load_mode": "mlock",
        "kv_unified": "false",
        "rope_freq_base": "1e6",
        "tokenizer": "/models/original",
    }
    assert read_options(stated) == Options(
        n_gpu_layers=-1,
        threads=4,
        flash_attn="on",
        type_k="q8_0",
        load_mode="mlock",
        kv_unified=False,
        rope_freq_base=1e6,
        tokenizer=Path("/models/original"),
    )


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"n_gpu_layer": "3"}, "did you mean n_gpu_layers"),
        ({"zzz": "3"}, "the llamacpp engine has no 'zzz'"),
        ({"threads": "0"}, "threads='0': expected a whole number from 1 on"),
        ({"threads": "two"}, "expected a whole number"),
        ({"type_v": "q3_k"}, "expected one of f32, f16"),
        ({"kv_unified": "maybe"}, "expected true or false"),
        ({"rope_freq_scale": "nan"}, "expected a number above 0"),
        ({"rope_freq_scale": "x"}, "rope_freq_scale='x'"),
    ],
)
def test_what_does_not_fit_is_named(stated: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=f"TIDEGATE_WORKER__ENGINE_ARGS.*{problem}"):
        read_options(stated)


def test_the_size_of_every_type_of_cell_is_known() -> None:
    assert CACHE_TYPES.keys() == CELL_BYTES.keys()
