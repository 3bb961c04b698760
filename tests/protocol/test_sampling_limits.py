"""WK-8: what may be asked of the sampler, and what is said about the rest."""

import math

import pytest

from protocol import InvalidSampling, Sampling, read_logit_bias
from tests.support.cases import for_each

BIASES = tuple((token, 0.5) for token in range(512))


@for_each(
    "good",
    [
        {"min_p": 1.0, "repetition_penalty": 10.0, "presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 1e-3, "logit_bias": BIASES},
        {"logit_bias": ((599, 100.0), (0, -100.0))},
    ],
)
def test_the_edges_are_allowed(good: dict[str, object]) -> None:
    Sampling(8, **good).check(600)  # type: ignore[arg-type]


@for_each(
    ("field", "bad"),
    [
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias", (*BIASES, (512, 1.0))),
        ("logit_bias", ((600, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
    ],
)
def test_what_is_beyond_them_is_refused_by_name(field: str, bad: object) -> None:
    with pytest.raises(InvalidSampling, match=field) as refusal:
        Sampling(8, **{field: bad}).check(600)  # type: ignore[arg-type]
    assert refusal.value.field == field


@for_each("key", ["", "x", "-1", "+1", "1_0", "1.0", " 1", "٣", "9" * 5000])
def test_keys_of_a_bias_are_token_ids(key: str) -> None:
    with pytest.raises(InvalidSampling, match="token ids"):
        read_logit_bias({key: 1.0})
