"""``perf/slot/gpu.py`` on toy sizes without a GPU: its logic, not its figures."""

import json
from pathlib import Path

import pytest

from perf.slot import gpu

pytestmark = pytest.mark.slow


def rows_of(tmp_path: Path, section: str) -> dict[str, object]:
    bundle = tmp_path / "bundle.json"
    options = ["--device", "cpu", "--tiny", "--allow-dirty", "--json", str(bundle)]
    assert gpu.main([*options, "--only", section]) == 0
    rows = json.loads(bundle.read_text())["rows"]
    assert {row["section"] for row in rows} == {section}
    return {row["what"]: row["value"] for row in rows}


def test_the_video_is_measured(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "video")
    assert set(rows) == {f"liveportrait fp32, 6 frames: {what}" for what in ("stays", "time")}
    assert all(isinstance(value, float) and value > 0 for value in rows.values())


def test_the_check_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the check by CLIP: tidegate[slot-clip]")
    assert "clip fp32, 5 keyframes: time" in rows_of(tmp_path, "check")


@pytest.mark.filterwarnings("ignore")
def test_the_portrait_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="portraits by FLUX: tidegate[slot-flux]")
    pytest.importorskip("bitsandbytes", reason="FLUX in four bits: tidegate[slot-flux]")
    rows = rows_of(tmp_path, "portrait nf4")
    for prompt in ("known", "new"):
        assert f"flux nf4, 64 pixels, {prompt} prompt: time" in rows


def test_what_is_not_installed_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("no module named diffusers")

    monkeypatch.setattr(gpu.random_models, "flux", missing)
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "portrait bf16"]) == 1
    assert "FAILED" in capsys.readouterr().out
