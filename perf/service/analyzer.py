"""NVIDIA's own ``perf_analyzer`` on the plain contract: nothing of ours measures here.

Streaming over gRPC, decoupled, against the demo model. Its profile export holds the time stamps of
every response, from which the figures are taken.
"""

import json
import tempfile
from pathlib import Path

import msgspec

from perf.report.bundle import Figure
from perf.stack import perf_analyzer
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec
from worker.protocol.tensors import MODEL_NAME, SAMPLING_PARAMETERS, STREAM, TEXT_INPUT

_CONCURRENCY = 4
_TOKENS = 32
_LIMIT_S = 60.0


class _Request(msgspec.Struct):
    """One request's times in nanoseconds since the epoch."""

    timestamp: int
    response_timestamps: list[int]


class _Experiment(msgspec.Struct):
    requests: list[_Request]
    window_boundaries: list[int] = []


class _Export(msgspec.Struct):
    experiments: list[_Experiment]


async def run(context: Context) -> list[Figure]:
    analyzer = await perf_analyzer.find()
    stack = await context.stack(StackSpec("torch", device=context.device))
    with tempfile.TemporaryDirectory() as directory:
        data, export = Path(directory, "data.json"), Path(directory, "export.json")
        _write_input(data)
        done = await perf_analyzer.execute(
            [
                *(str(analyzer.binary), "-m", MODEL_NAME, "-u", stack.grpc_address, "-i", "grpc"),
                *("--async", "--streaming", f"--input-data={data}"),
                f"--concurrency-range={_CONCURRENCY}",
                *("--measurement-mode=count_windows", "--measurement-request-count=20"),
                *("--stability-percentage=50", "--max-trials=4"),
                f"--profile-export-file={export}",
            ],
            analyzer.env,
            limit_s=_LIMIT_S,
        )
        if done.status != 0:
            raise RuntimeError(f"perf_analyzer ended with {done.status}: {done.output[-1500:]}")
        return _figures(_read_export(export))


def _write_input(path: Path) -> None:
    sampling = json.dumps({"max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True})
    request = {TEXT_INPUT: ["Once upon a time"], STREAM: [True], SAMPLING_PARAMETERS: [sampling]}
    path.write_text(json.dumps({"data": [request]}))


def _read_export(path: Path) -> list[_Request]:
    return msgspec.json.decode(path.read_bytes(), type=_Export).experiments[0].requests


def _figures(requests: list[_Request]) -> list[Figure]:
    """Figures of all requests. Raises ``RuntimeError`` when a token of any request is missing."""
    short = [r for r in requests if len(r.response_timestamps) > _TOKENS]
    if short or not requests:
        raise RuntimeError(f"{len(short)} of {len(requests)} requests had too many responses")
    first = [(r.response_timestamps[0] - r.timestamp) / 1e6 for r in requests]
    whole = [(r.response_timestamps[-1] - r.timestamp) / 1e6 for r in requests]
    gaps = [
        (later - earlier) / 1e6
        for r in requests
        for earlier, later in zip(r.response_timestamps, r.response_timestamps[1:], strict=False)
    ]
    of = Figure.of
    return [
        of("perf_analyzer.ttft_ms", "time to first response", "ms", first, spread="p5–p95"),
        of("perf_analyzer.gap_ms", "between responses", "ms", gaps, spread="p5–p95"),
        of(
            "perf_analyzer.request_ms",
            f"whole request of {_TOKENS} tokens",
            "ms",
            whole,
            spread="p5–p95",
        ),
    ]


BENCH = Bench(
    "perf_analyzer",
    f"NVIDIA's perf_analyzer on the plain contract, {_CONCURRENCY} streams at once",
    run,
    limit_s=240,
    in_quick=False,
)
