"""Placement is a pure function of needs and snapshot (OR-7)."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.placement import Candidate, Need, place

NEED = Need("m", b"v")

candidates = st.lists(
    st.builds(
        Candidate,
        name=st.text("abc", min_size=1, max_size=4),
        model=st.sampled_from(["m", "other"]),
        vocabulary=st.sampled_from([b"v", b"w"]),
        ready=st.booleans(),
        slots=st.integers(1, 8),
        load=st.integers(0, 10),
    ),
    max_size=8,
    unique_by=lambda c: c.name,
)


@given(candidates, st.randoms())
def test_or7_the_choice_fits_is_least_loaded_and_does_not_depend_on_order(
    given_candidates: list[Candidate], rng: object
) -> None:
    chosen = place(NEED, given_candidates)
    able = [
        c
        for c in given_candidates
        if c.ready and c.load < c.slots and (c.model, c.vocabulary) == ("m", b"v")
    ]
    assert (chosen is None) == (not able)
    if chosen is not None:
        assert chosen in able
        assert chosen.load / chosen.slots == min(c.load / c.slots for c in able)
    assert place(NEED, given_candidates[::-1]) == chosen
