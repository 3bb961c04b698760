"""Speech in a process of its own: it stops when asked, whatever C does, and nothing is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clips.plan.plan import SAMPLE_RATE
from clips.plan.recipe import read_recipe
from clips.render.stages import espeak_child
from clips.render.stages.espeak import EspeakSpeech
from tests.support.processes import eventually

pytest.importorskip("espeakng_loader", reason="speech by eSpeak NG: tidegate[slot]")

RECIPE = read_recipe({"schema": "1.0", "text": "Good morning."})
HANGS_ONCE = f"""
import ctypes, os, sys
sys.path.insert(0, {str(Path(espeak_child.__file__).parent)!r})
import espeak_child

def hang(library, request, serve=espeak_child._serve):
    if not os.path.exists({{flag!r}}):
        open({{flag!r}}, "w").close()
        ctypes.CDLL(None).sleep(1000)
    serve(library, request)

espeak_child._serve = hang
espeak_child.main(*sys.argv[1:])
"""


def program(folder: Path, text: str) -> Path:
    path = folder / "child.py"
    path.write_text(text)
    return path


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_call_that_hangs_is_ended_and_the_next_is_served(tmp_path: Path) -> None:
    flag = str(tmp_path / "hung")
    speech = EspeakSpeech(program(tmp_path, HANGS_ONCE.format(flag=flag)))
    pid = speech._process.pid
    audio = torch.zeros(2 * SAMPLE_RATE)

    def give_up(done: float) -> None:
        if Path(flag).exists():
            raise TimeoutError

    with pytest.raises(TimeoutError):
        speech.render(RECIPE, audio, give_up)
    assert not is_running(pid)
    assert speech.render(RECIPE, audio, lambda done: None) > SAMPLE_RATE // 2
    assert float(audio.abs().max()) > 0.5
    speech.close()


def test_a_crash_fails_one_attempt(tmp_path: Path) -> None:
    speech = EspeakSpeech()
    audio = torch.zeros(2 * SAMPLE_RATE)
    os.kill(speech._process.pid, signal.SIGSEGV)
    with pytest.raises(OSError, match=r"eSpeak NG ended with status -11|Broken pipe"):
        speech.render(RECIPE, audio, lambda done: None)
    assert speech.render(RECIPE, audio, lambda done: None) > SAMPLE_RATE // 2
    pid = speech._process.pid
    speech.close()
    assert not is_running(pid)


ORPHAN = """
import sys, threading, torch
from pathlib import Path
from clips.plan.recipe import read_recipe
from clips.render.stages.espeak import EspeakSpeech

speech = EspeakSpeech(Path(sys.argv[1]))
print(speech._process.pid, flush=True)
recipe = read_recipe({"schema": "1.0", "text": "Hi"})
speech.render(recipe, torch.zeros(24_000), lambda done: None)
"""


@pytest.mark.slow
def test_it_dies_with_a_worker_that_is_killed_while_it_hangs(tmp_path: Path) -> None:
    flag = tmp_path / "hung"
    child = program(tmp_path, HANGS_ONCE.format(flag=str(flag)))
    command = [sys.executable, "-c", ORPHAN, str(child)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        eventually(flag.exists, "eSpeak to hang")
        assert is_running(pid)
        worker.kill()
    eventually(lambda: not is_running(pid), "eSpeak's process to end")
