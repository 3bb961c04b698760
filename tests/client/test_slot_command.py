"""``tidegate slot`` before an orchestrator that speaks from a script."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import Cli, in_terminal
from tests.client.test_slots import FAILURE, QUEUED, result, stage
from tests.support.fake_orchestrator import HANG, FakeOrchestrator, sse
from tidegate.cli.main import main
from tidegate.cli.runtime import INTERRUPTED

FILES = {"clip.mp4": b"an mp4", "speech.wav": b"a wav", "portrait.png": b"a png"}
WHOLE = [QUEUED, stage(1, "audio", 100), stage(3, "video", 40), result(4)]
Command = Callable[..., Any]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Run ``tidegate slot`` in a directory of its own; its exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEGATE_TOKEN", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)

    async def run(fake: FakeOrchestrator, *argv: str) -> tuple[int, str, str]:
        fake.files = FILES
        async with fake.serve():
            status = await asyncio.to_thread(main, ["slot", "--url", fake.base_url, *argv])
        return status, *capsys.readouterr()

    return run


async def test_a_clip_is_saved_and_told_of(command: Command, tmp_path: Path) -> None:
    fake = FakeOrchestrator(WHOLE)
    status, out, err = await command(fake, "Hello.", "--deadline", "20", "--on-deadline", "degrade")
    assert status == 0
    assert (tmp_path / "clip.mp4").read_bytes() == b"an mp4"
    assert out.splitlines() == [
        "clip.mp4   0 kB",
        "1.5 s, 36 frames at 24/s, 256 × 256",
        "speech 30 ms · portrait 20 ms · video 100 ms · check 5.0 ms · in all 140 ms",
        "dropped to meet the deadline: check",
    ]
    assert err.splitlines()[0] == "queued: 2 before it, expected in 900 ms"
    assert err.splitlines()[1].startswith("speech done after ")
    (body,) = fake.submitted
    assert body == {
        "recipe": {"schema": "1.1", "text": "Hello."},
        "outputs": ["mp4"],
        "on_disconnect": "cancel",
        "on_deadline": "degrade",
        "deadline_ms": 20_000,
    }
    assert set(os.listdir(tmp_path)) == {"clip.mp4"}


async def test_arguments_change_a_recipe_and_every_file_is_saved_for_programs(
    command: Command, tmp_path: Path
) -> None:
    recipe = {"schema": "1.0", "text": "Hello.", "portrait": {"seed": 5}, "voice": {"rate": 1.2}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    outputs = {name: f"/v2/slots/t1/outputs/{name}" for name in ("mp4", "wav", "png")}
    made = {"slot_id": "t1", "seconds": 1.5, "frames": 36, "fps": 24, "outputs": outputs}
    fake = FakeOrchestrator([QUEUED, sse(1, "result", made)])
    argv = ["--recipe", "recipe.json", "--portrait", "a host", "--size", "128", "--seconds", "3.5"]
    files = ["--out", "a.mp4", "--out", "b.WAV", "--out", "c.png"]
    status, out, _ = await command(fake, *argv, *files, "--json")
    assert status == 0
    assert fake.submitted[0]["outputs"] == ["mp4", "wav", "png"]
    assert fake.submitted[0]["recipe"] == {
        **recipe,
        "portrait": {"prompt": "a host", "seed": 5},
        "video": {"size": 128, "seconds": 3.5},
    }
    told = json.loads(out)
    assert told["files"] == {"mp4": "a.mp4", "wav": "b.WAV", "png": "c.png"}
    assert (told["frames"], (tmp_path / "c.png").read_bytes()) == (36, b"a png")


async def test_a_failure_is_said_and_what_there_was_is_saved(
    command: Command, tmp_path: Path
) -> None:
    fake = FakeOrchestrator([QUEUED, sse(1, "error", FAILURE)])
    status, out, err = await command(fake, "Hello.", "--out", "a.mp4", "--out", "b.wav")
    assert (status, out) == (1, "")
    assert err.splitlines()[-2:] == [
        "tidegate slot: saved b.wav (wav), partial result",
        "tidegate slot: video: out of time; give it more time",
    ]
    assert set(os.listdir(tmp_path)) == {"b.wav"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "give a text, or a --recipe"),
        (["Hi.", "--out", "clip.avi"], "--out clip.avi: its name must end in .mp4, .wav or .png"),
        (["Hi.", "--out", "a.mp4", "--out", "b.mp4"], "--out: one file of each kind at most"),
        (["Hi.", "--out", "none/a.mp4"], "there is no directory none"),
        (["--recipe", "none.json"], "--recipe none.json: No such file or directory"),
        (["--recipe", "broken.json"], "--recipe broken.json is not JSON"),
        (["--recipe", "list.json"], "--recipe list.json holds no JSON object"),
        (["Hi.", "--on-deadline", "wait"], "is not one of 'error', 'degrade'"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_rendered(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("list.json").write_text("[]")
    assert said in cli("slot", "--url", "http://127.0.0.1:1", *argv, status=2).err


async def test_in_a_terminal_a_stage_is_shown_and_ctrl_c_cancels(tmp_path: Path) -> None:
    fake = FakeOrchestrator([QUEUED, stage(1, "audio", 100), stage(2, "video", 40), HANG])
    fake.ended = True
    async with fake.serve():
        words = ("slot", "Hello.", "--url", fake.base_url, "--out", str(tmp_path / "clip.mp4"))
        status, shown = await in_terminal(*words, until=lambda shown: b"video 40 %" in shown)
    assert status == INTERRUPTED
    assert b"speech done after " in shown
    assert b"tidegate slot: cancelled slot t1" in shown and b"Traceback" not in shown
    assert fake.cancelled == ["t1"]
    assert not os.listdir(tmp_path)


async def test_ctrl_c_says_when_the_service_could_not_be_told(capsys: Any) -> None:
    from tidegate import Client
    from tidegate.cli.slot import _say_cancelled

    async with FakeOrchestrator().serve() as fake, Client(fake.base_url) as client:
        await _say_cancelled(client, "t1")  # which still runs
        assert "slot t1 may still be rendered" in capsys.readouterr().err
        await _say_cancelled(client, "")
        assert capsys.readouterr().err == "tidegate slot: cancelled\n"
