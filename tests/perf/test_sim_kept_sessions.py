"""WK-9 on the simulator: a kept conversation begins sooner, and nobody is late for it."""

from perf.sim.kept_sessions import KEEP_S, ONE, SCENARIO, KeptTurns, measure

SEED = 2
OTHERS_PER_S = 14.0
"""So many that they use up the pool between two turns: then keeping shows in every seed."""


def kept_for(keep_s: float) -> KeptTurns:
    others = list(SCENARIO.arrivals(OTHERS_PER_S, 30.0, SEED))
    return measure(others, keep_s, ONE, seed=SEED)


def test_wk9_kept_conversations_compute_less_and_others_lose_nothing() -> None:
    kept, not_kept = kept_for(KEEP_S), kept_for(0.0)
    assert kept.turns >= 15
    assert kept.cached_share > 1.2 * not_kept.cached_share
    assert kept.turns_met >= not_kept.turns_met
    assert kept.others_met >= 0.99 * not_kept.others_met
