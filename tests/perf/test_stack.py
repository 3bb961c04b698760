"""The yardstick and the emitter speak the stream that the load generator counts."""

from pathlib import Path

import pytest

from perf.load.closed_loop import ClosedLoopPlan, LoadFailed
from perf.load.connection import HOST
from perf.load.drive import MeasuredWindows, apply, completion, overhead_events, stream
from perf.stack.stack import server


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["perf.stack.baseline", "perf.stack.emitter"])
async def test_both_servers_send_one_event_per_token(module: str) -> None:
    """PF-1: what is compared does the same work, event for event."""
    body = completion("demo", 64)
    async with server(module) as process:
        assert process.pid is not None
        overhead = await overhead_events(process.port, body)
        assert overhead == 3  # finish reason, usage, [DONE]
        windows, watch = MeasuredWindows(0.05, 0.1, 2), {"server": process.pid}
        result = await stream(process.port, body, 4, windows, watch=watch, poll_ms=1.0)
        with pytest.raises(LoadFailed, match=r"hung up|answered"):
            await apply(
                ClosedLoopPlan(
                    host=HOST,
                    port=process.port,
                    path="/nowhere",
                    body=body,
                    clients=1,
                    overhead_events=overhead,
                    windows=1,
                )
            )
    assert result.tokens == result.requests * 64 > 0
    assert [window.cpu_s.keys() for window in result.windows] == 2 * [{"server"}]
