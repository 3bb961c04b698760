"""A process that replays one recording: ``python -m perf.sim.replay``.

Reads a ``ReplayQuestion`` from its standard input and writes ``Findings``, both as msgpack. Runs at
a low priority: those who are served go first.
"""

import os
import sys
from contextlib import suppress

import msgspec

from orchestrator.recording.findings import ReplayQuestion
from perf.sim.replay.verdict import explain


def main() -> None:
    with suppress(OSError):
        os.nice(10)
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ReplayQuestion)
    sys.stdout.buffer.write(msgspec.msgpack.encode(explain(question)))


if __name__ == "__main__":
    main()
