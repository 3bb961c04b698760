"""What the long run of clips calls a wrong answer."""

from perf.clips.client import ClipReply, ClipRequest
from perf.clips.soak import ClipSoak, Visit, figures, judge_answers
from perf.load.usage import Looks, ServerUsage

CLIP = {"event": "result", "seconds": 1.0, "frames": 6, "fps": 6, "size": 64, "given_up": []}


def answered(
    kind: str, reply: ClipReply, *right: str, outputs: str = "mp4"
) -> tuple[float, Visit, ClipReply]:
    return 1.0, Visit(kind, ClipRequest({"text": "Hi."}, outputs=outputs), frozenset(right)), reply


def clip(**facts: object) -> ClipReply:
    return ClipReply(0.0, ended_at=1.0, facts=CLIP | facts, bytes={"mp4": 900})


def test_a_wrong_answer_is_a_fault() -> None:
    usage = {"server": ServerUsage(400.0, 4.0, 40, 80, 2)}
    found = ClipSoak(looks=Looks([(float(at), usage) for at in range(10)], seconds=10.0))
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
