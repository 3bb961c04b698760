"""``tidegate plan``: from recorded figures to a number of instances."""

import json
from pathlib import Path

import pytest

from tidegate.cli.main import main

PACE = {
    "slots": 8,
    "step_tokens": 512,
    "base_ms": 10.0,
    "row_ms": 1.0,
    "prompt_token_ms": 0.01,
    "ratio": 1.0,
}
LOAD = ["plan", "--deadline", "2s", "--rps", "40", "--tokens", "50"]


def instance(address: str = "a:1", model: str = "m", **pace: float) -> dict[str, object]:
    prediction = {"steps": 500, "jobs": 9, "spread": 1.5, "pace": PACE | pace}
    return {"address": address, "state": "up", "model": model, "prediction": prediction}


def run(tmp_path: Path, recorded: object, *more: str) -> int:
    file = tmp_path / "recorded.json"
    file.write_text(recorded if isinstance(recorded, str) else json.dumps(recorded))
    return main([*LOAD, "--instance", str(file), *more])


def test_it_says_how_many_and_on_what_that_rests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, {"instances": [instance()]}) == 0
    said = capsys.readouterr().out
    assert "instances keep 99 % of deadlines" in said and "a tenth more load" in said.lower()
    assert "10 ms + 1 ms a row" in said and "Poisson" in said and "100 tokens of prompt" in said


def test_the_slowest_of_several_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = instance(), instance("b:1", base_ms=20.0)
    needed = []
    for recorded in (fast, slow, {"instances": [fast, slow]}):
        assert run(tmp_path, recorded, "--json") == 0
        needed.append(json.loads(capsys.readouterr().out)["plan"]["enough"]["instances"])
    assert needed[0] < needed[1] == needed[2]


def test_few_steps_are_called_rough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = instance()
    recorded["prediction"]["steps"] = 3  # type: ignore[index]
    assert run(tmp_path, recorded) == 0
    assert "only 3 steps were measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recorded", "more", "said"),
    [
        ("{", [], "is not a response of GET /v2/instances"),
        ("[]", [], "is not a response of GET /v2/instances"),
        ({"instances": [{"address": 3}]}, [], "is not a response of GET /v2/instances"),
        ({"instances": []}, [], "no instance has measured steps"),
        ({"address": "a:1", "state": "up"}, [], "no instance has measured steps"),
        (instance(slots=0), [], "prediction.pace of a:1 cannot be"),
        (instance(row_ms=-1.0), [], "prediction.pace of a:1 cannot be"),
        (instance(ratio=0.0), [], "ratio of a:1 must be above 0"),
        (instance(), ["--model", "x"], "no instance has the model 'x': there are m"),
        (
            {"instances": [instance(), instance("b:1", "n")]},
            [],
            "name one of several models with --model: m, n",
        ),
        (instance(), ["--tokens", "5000"], "no number of instances keeps that"),
    ],
)
def test_what_cannot_be_planned_with_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recorded: object,
    more: list[str],
    said: str,
) -> None:
    assert run(tmp_path, recorded, *more) == 1
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LOAD, "--instance", "/nowhere/recorded.json"]) == 1
    assert "cannot read /nowhere/recorded.json: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("deadline", ["0", "-1s", "2h", "soon", "nan"])
def test_a_deadline_is_a_time(deadline: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", f"--deadline={deadline}", "--rps", "1", "--tokens", "1"])
    assert ended.value.code == 2
    assert "expected a time such as 2s, 500ms or 1.5m" in capsys.readouterr().err
