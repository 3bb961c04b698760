"""Requests taken out of a large JSON body, however it is cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.batches.elements import Elements, NoElements

_values = st.recursive(
    st.none() | st.integers() | st.text('ab"\\{}[], é'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"]}\\'), inner),
    max_leaves=8,
)


@settings(max_examples=30)
@given(
    requests=st.lists(st.dictionaries(st.text(), _values), max_size=5),
    before=st.dictionaries(st.just("other"), _values),
    after=st.dictionaries(st.just("more"), _values),
    cut=st.integers(1, 40),
    indent=st.sampled_from([None, 2]),
)
def test_each_object_comes_once_and_the_rest_stays(
    requests: list[object],
    before: dict[str, object],
    after: dict[str, object],
    cut: int,
    indent: int | None,
) -> None:
    body = json.dumps(before | {"requests": requests} | after, indent=indent).encode()
    elements = Elements(10**6)
    pieces = [body[at : at + cut] for at in range(0, len(body), cut)]
    found = [json.loads(one) for piece in pieces for one in elements.feed(piece)]
    assert found == requests
    assert json.loads(elements.rest) == before | {"requests": []} | after


@pytest.mark.parametrize(
    "body",
    [
        b'{"requests":[{} {}]}',
        b'{"requests":[{},]}',
        b'{"requests":[1]}',
        b'{"requests":[{}, 2, {}]}',
        b'{"requests":[]}}}',
        b'{"requests":[{"a":"' + b"x" * 2000 + b'"}]}',
        b'{"other":"' + b"x" * 70_000,
    ],
)
def test_what_is_no_list_of_objects_is_refused(body: bytes) -> None:
    with pytest.raises(NoElements):
        list(Elements(1000).feed(body))
