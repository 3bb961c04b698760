"""What the long run of clips calls growth, and what it calls a wrong answer."""

from perf.clips.client import ClipReply, ClipRequest
from perf.clips.soak import ClipSoak, Visit, figures, judge_answers, judge_growth
from perf.load.usage import Looks, ServerUsage

CLIP = {"event": "result", "seconds": 1.0, "frames": 6, "fps": 6, "size": 64, "given_up": []}


def run_of(*rss_mib: float, fds: int = 40) -> ClipSoak:
    """A look each second."""
    looks = [
        (float(at), {"server": ServerUsage(rss, 4.0, fds, 80, 2)}) for at, rss in enumerate(rss_mib)
    ]
    return ClipSoak(looks=Looks(looks, seconds=float(len(looks))))


def answered(
    kind: str, reply: ClipReply, *right: str, outputs: str = "mp4"
) -> tuple[float, Visit, ClipReply]:
    return 1.0, Visit(kind, ClipRequest({"text": "Hi."}, outputs=outputs), frozenset(right)), reply


def clip(**facts: object) -> ClipReply:
    return ClipReply(0.0, ended_at=1.0, facts=CLIP | facts, bytes={"mp4": 900})


def test_memory_that_fills_at_first_has_not_grown_and_what_goes_on_has() -> None:
    settled = run_of(100, *[400.0] * 9)
    judge_growth(settled)
    assert settled.faults == []
    leaking = run_of(*(400.0 + 10 * at for at in range(10)))
    judge_growth(leaking)
    assert leaking.faults == ["rss_mib grew from 410.0 to 490.0"]
    leaking.faults.clear()
    leaking.replies = [answered("clip", clip(), "result")] * 100  # SL-3 allows for 100 MiB
    judge_growth(leaking)
    assert leaking.faults == []


def test_a_wrong_answer_is_a_fault() -> None:
    found = run_of(*[400.0] * 10)
    found.replies = [
        answered("clip", clip(), "result"),
        answered("clip", clip(seconds=0.99), "result"),
        answered("cancelled", ClipReply(0.0, is_cancelled=True), "result", "cancelled"),
    ]
    judge_answers(found)
    assert found.faults == []
    assert {figure.key for figure in figures(found)} >= {"soak.clip.result", "soak.rss_mib.growth"}
    found.replies += [
        answered("clip", clip(frames=9), "result"),
        answered("clip", ClipReply(0.0, error="internal: it failed"), "result"),
        answered("clip", clip(), "result", outputs="mp4,wav"),
    ]
    judge_answers(found)
    assert len(found.faults) == 3 and "internal: it failed" in found.faults[1]
