"""What lanes hear of the prefix cache is, in the end, what it holds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol import Describe, KvReport
from tests.worker.service.conftest import Harness
from worker.engine.kv_events import KvEvents
from worker.service.lane import KvMirror

HASHES = st.sets(st.integers(0, 9).map(lambda i: bytes([i])), max_size=6)


def heard(known: set[bytes], report: KvReport | None) -> set[bytes]:
    """What somebody knows after a report, who knew ``known`` before."""
    if report is None:
        return known
    assert len(set(report.added)) == len(report.added)
    assert not set(report.added) & set(report.evicted)
    if report.full:
        return set(report.added)
    assert set(report.evicted) <= known
    return (known | set(report.added)) - set(report.evicted)


class NewsMachine(RuleBasedStateMachine):
    """Blocks come and go, lanes read seldom and little, some start over."""

    def __init__(self) -> None:
        super().__init__()
        self.truth: set[bytes] = set()
        self.mirror = KvMirror()
        self.events = KvEvents(())
        self.known: set[bytes] = {b"something old"}

    @rule(added=HASHES, evicted=HASHES)
    def change(self, added: set[bytes], evicted: set[bytes]) -> None:
        added -= self.truth
        evicted &= self.truth
        self.truth = (self.truth | added) - evicted
        self.report(KvReport(sorted(added), sorted(evicted)))

    @rule(hashes=HASHES)
    def start_over(self, hashes: set[bytes]) -> None:
        self.truth = hashes
        self.report(KvReport(sorted(hashes), [], full=True))

    def report(self, report: KvReport) -> None:
        self.mirror.apply(report)
        self.events.add(report)

    @rule(most=st.integers(1, 4))
    def read(self, most: int) -> None:
        report = self.events.take(most)
        assert report is None or len(report.added) + len(report.evicted) <= most
        self.known = heard(self.known, report)

    @rule()
    def describe(self) -> None:
        self.events = KvEvents(self.mirror.hashes)

    @rule()
    def read_all(self) -> None:
        while (report := self.events.take(3)) is not None:
            self.known = heard(self.known, report)
        assert self.known == self.truth

    @invariant()
    def the_view_is_the_truth(self) -> None:
        assert set(self.mirror.hashes) == self.truth


TestNews = NewsMachine.TestCase
TestNews.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_changes_ride_in_frames_of_every_lane(harness: Harness) -> None:
    harness.engine.reports.append(KvReport([b"a", b"b"], []))
    harness.lane.wait(lambda: known(harness) == {b"a", b"b"}, "the additions")
    harness.engine.reports.append(KvReport([b"c"], [b"a"]))
    harness.lane.wait(lambda: known(harness) == {b"b", b"c"}, "the eviction")


def test_describe_resynchronises(harness: Harness) -> None:
    harness.engine.reports.append(KvReport([b"a"], []))
    harness.lane.wait(lambda: known(harness) == {b"a"}, "the addition")
    harness.send(Describe("lane")).wait_final()
    harness.lane.wait(lambda: sum(r.full for r in reports(harness)) == 2, "the full report")
    (_, again) = [report for report in reports(harness) if report.full]
    assert again.added == [b"a"]


def reports(harness: Harness) -> list[KvReport]:
    return [frame.cache for frame in harness.lane.frames() if frame.cache is not None]


def known(harness: Harness) -> set[bytes]:
    hashes: set[bytes] = set()
    for report in reports(harness):
        hashes = heard(hashes, report)
    return hashes
