"""A machine without a Triton server gets the wheel's, or is told why not."""

import asyncio
import sys
from pathlib import Path

import pytest

from catalog.errors import FetchFailed
from pool.engines import triton_wheel as wheel
from pool.engines.triton_fetch import fetch_triton
from tests.support.processes import Marked, eventually

UNPACKS = """
import sys
from pathlib import Path
from tests.pool.engines.test_triton_wheel import unpack

unpack(Path(sys.argv[sys.argv.index("--target") + 1]))
"""


def pip(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def folders(home: Path) -> list[str]:
    return [path.name for path in home.iterdir() if path.is_dir()]


async def test_fetches_and_lays_out_once(tmp_path: Path) -> None:
    await fetch_triton(tmp_path, pip(UNPACKS))
    assert wheel.is_prepared(tmp_path)
    await fetch_triton(tmp_path, pip("raise SystemExit('fetched again')"))


async def test_pips_last_words_are_shown(tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match=r"(?s)no such index.*PIP_INDEX_URL.*--triton PATH"):
        await fetch_triton(tmp_path, pip("raise SystemExit('no such index')"))
    assert not wheel.is_downloaded(tmp_path)


async def test_a_cancelled_fetch_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = Marked()
    for name, value in marked.mark.items():
        monkeypatch.setenv(name, value)
    ready = tmp_path / "ready"
    waits = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"
    fetching = asyncio.create_task(fetch_triton(tmp_path, pip(waits)))
    await asyncio.to_thread(eventually, ready.exists, lambda: "pip did not start")
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    marked.wait_gone(set())
    assert folders(tmp_path) == ["logs"]
