"""What the long run of text and durable tasks calls growth, and what a wrong answer."""

from collections import Counter

from perf.chaos.clients import ChaosLedger
from perf.chaos.soak import Soak, judge_answers, judge_growth, rows_of
from perf.load.usage import Looks, ServerUsage


def run_of(*rss_mib: float, fds: tuple[int, ...] = ()) -> Soak:
    """A look each second."""
    counts = fds or (20,) * len(rss_mib)
    looks = [
        (float(at), {"worker": ServerUsage(rss, 0.0, counts[at], 7, 1)})
        for at, rss in enumerate(rss_mib)
    ]
    return Soak(ChaosLedger(), Looks(looks, seconds=float(len(looks))))


def test_memory_that_fills_at_first_has_not_grown_and_a_twentieth_more_has() -> None:
    settled = run_of(300, *[400.0] * 8, 419.9)
    judge_growth(settled)
    assert settled.ledger.faults == []
    leaking = run_of(*(400.0 + 4 * at for at in range(10)))
    judge_growth(leaking)
    assert leaking.ledger.faults == ["soak: worker's memory grew from 404.0 to 436.0 MiB"]
    (row,) = rows_of(leaking)
    assert row.growth_percent == 7.92 and row.rss_mib[-1] == 436.0


def test_files_that_stay_open_are_growth_and_a_moments_more_are_not() -> None:
    leaking = run_of(*[400.0] * 10, fds=(20, 20, 21, 22, 23, 24, 25, 26, 27, 28))
    judge_growth(leaking)
    assert leaking.ledger.faults == ["soak: worker's fds grew from 20 to 28"]
    busy = run_of(*[400.0] * 20, fds=(20, 40) * 10)
    judge_growth(busy)
    assert busy.ledger.faults == []


def test_whatever_is_not_met_is_a_fault_and_so_is_a_refusal() -> None:
    ledger = ChaosLedger(outcomes={"soak": Counter({("plain", "met"): 9})})
    judge_answers(ledger)
    assert ledger.faults == []
    ledger.outcomes["soak"]["plain", "broken"] = 2
    ledger.refusals = 1
    judge_answers(ledger)
    assert ledger.faults == [
        "soak: 2 plain requests came to broken",
        "soak: 1 requests were refused",
    ]
