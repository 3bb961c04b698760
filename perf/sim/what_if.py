"""``python -m perf.sim.what_if FILE --request ID``: what alone would have met a missed request.

``FILE`` is what an operator's route gave::

    curl -H "Authorization: Bearer $KEY" http://127.0.0.1:8080/admin/recording > FILE

``ID`` is a task's id or its answer's. The recording is replayed as it was, then with one thing
changed at a time (``replay.verdict``). The status is 1 where there is nothing to replay.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from orchestrator.api.http.finding import task_id_of
from perf.sim.replay.again import Recorded, RecordedLoad, RecordedRequest
from perf.sim.replay.verdict import Alone, Findings, Tried, find

TRUSTED: Final = 0.95
"""Share of outcomes that a replay must come to again to be relied on."""
_CHANGES: Final = {
    Alone.LET_IN: "to be let in and not given up before its deadline",
    Alone.ONE_MORE_INSTANCE: "one more instance",
    Alone.NOBODY_ELSE: "nobody else beside it",
}


def told(recording: RecordedLoad, found: Findings) -> Iterator[str]:
    """What was found, in words."""
    yield what_happened(recording.request)
    if found.outcome is None:
        yield "It could not be replayed: no instance of its model is recorded, or it did not end."
        return
    if found.is_reproduced:
        met = [_change(tried) for tried in found.tried if tried.met]
        not_met = [_change(tried) for tried in found.tried if not tried.met]
        yield f"This alone would have met it: {'; or '.join(met) or 'nothing that was tried'}."
        if not_met:
            yield f"This would not: {'; '.join(not_met)}."
    else:
        yield "Replayed, it is met: what kept it from that is not in what is recorded."
    if recording.request.was_cut:
        yield (
            f"Its answer was cut: it is taken to be {recording.request.length} tokens long, as "
            "half of such answers are."
        )
    yield _trust(found)
    if recording.is_cut:
        yield "Not all that was under way then is in the recording, or it was too much."


def what_happened(request: RecordedRequest) -> str:
    """What became of a request, and when."""
    marks, since = request.marks, request.arrived
    events = [("sent", marks.dispatched), ("first token", marks.first_token)]
    for pause in request.pauses:
        events += [("paused", pause.at), ("resumed", pause.until)]
    when = [f"{name} at {at - since:.3f} s" for name, at in events if 0 < at <= request.ended]
    code = f" ({request.code})" if request.code else ""
    return (
        f"{request.id}: {request.outcome}{code}; {', '.join([*when, 'ended'])} at "
        f"{request.ended - since:.3f} s of {request.deadline_at - since:.3f} s, with "
        f"{request.tokens} tokens."
    )


def _change(tried: Tried) -> str:
    return _CHANGES.get(tried.change) or f"a deadline {tried.by_s:.1f} s later"


def _trust(found: Findings) -> str:
    """How far the replay can be relied on."""
    if not found.compared:
        return "No other outcome is there to check the replay by."
    share = found.agreed / found.compared
    return (
        f"Of {found.compared} requests, {found.agreed} are met or not in the replay as they were "
        f"({100 * share:.0f} %){'' if share >= TRUSTED else ': too few to rely on it'}."
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--request", required=True, metavar="ID")
    args = parser.parse_args(argv)
    try:
        recorded = Recorded.read(args.file.read_bytes())
    except (OSError, LookupError, TypeError, msgspec.MsgspecError) as error:
        parser.error(f"{args.file}: {error}")
    name = task_id_of(args.request)
    asked = next((one for one in recorded.requests if one.id == name), None)
    if asked is None:
        print(f"{args.file} has no request {name}", file=sys.stderr)
        return 1
    if not asked.is_miss:
        print(f"{name} missed nothing: {asked.outcome or 'under way'}", file=sys.stderr)
        return 1
    recording = recorded.around(asked)
    print("\n".join(told(recording, find(recording))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
