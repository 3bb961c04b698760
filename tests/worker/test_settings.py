"""Settings of the worker and of the slot model: one naming rule, and answers to mistakes."""

import json
from pathlib import Path

import pytest

from clips.render import settings as slot
from worker.memory import MemoryLimits
from worker.settings import read_settings, variable


@pytest.fixture(autouse=True)
def model_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_WORKER__MODEL_PATH", "/m")


def test_every_setting_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = {
        "device": "cpu",
        "kv.blocks": "64",
        "kv.disk_path": "/kv",
        "kv.prefix_cache": "false",
        "memory.hard_gib": "2.5",
        "plain.token": "secret",
    }
    for name, value in stated.items():
        monkeypatch.setenv(variable(name), value)
    assert variable("kv.blocks") == "TIDEGATE_WORKER__KV__BLOCKS"
    settings = read_settings()
    assert settings.device == "cpu"
    assert (settings.kv.blocks, settings.kv.disk_path) == (64, Path("/kv"))
    assert not settings.kv.prefix_cache
    assert settings.memory.hard_gib == 2.5
    assert settings.plain.token is not None
    assert settings.plain.token.get_secret_value() == "secret"


def test_a_section_may_be_one_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_WORKER__KV", json.dumps({"blocks": 3, "disk_bytes": 9}))
    monkeypatch.setenv("TIDEGATE_WORKER__KV__BLOCKS", "4")
    kv = read_settings().kv
    assert (kv.blocks, kv.disk_bytes) == (4, 9)


def test_an_empty_token_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_WORKER__PLAIN__TOKEN", "")
    monkeypatch.setenv("TIDEGATE_WORKER__LANE_TOKEN", "")
    settings = read_settings()
    assert settings.plain.token is None and settings.lane_token is None


def test_settings_of_the_slot_model_are_nested_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_SLOT__SIZE", "128")
    monkeypatch.setenv("TIDEGATE_SLOT__FOLDERS", '{"clip": "/a, /b", "flux": "/c"}')
    monkeypatch.setenv("TIDEGATE_SLOT__PRECISIONS", '{"clip": "bf16"}')
    settings = slot.read_clip_settings()
    assert settings.size == 128
    assert settings.folders == slot.Folders(flux="/c", clip=("/a", "/b"))
    assert settings.precisions == slot.Precisions("nf4", "fp16", "bf16")


def test_the_slot_models_limits_are_11_and_11_and_a_half_gb() -> None:
    """SL-3."""
    limits = MemoryLimits.of(slot.RenderSettings().memory.hard_gib)
    for limit, gigabytes in ((limits.soft_bytes, 11.0), (limits.hard_bytes, 11.5)):
        assert limit == pytest.approx(gigabytes * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"TIDEGATE_WORKER_KV_BLOCKS": "4"}, r"not a .* mean TIDEGATE_WORKER__KV__BLOCKS\?"),
        (
            {"TIDEGATE_WORKER__KV__BLOKS": "4"},
            r"invalid: TIDEGATE_WORKER__KV__BLOKS: .* mean TIDEGATE_WORKER__KV__BLOCKS\?$",
        ),
        ({"TIDEGATE_WORKER__KV": '{"kv_blocks": 4}'}, "kv.kv_blocks: not a setting"),
        ({"TIDEGATE_WORKER__KV__BLOCKS": "-1"}, "TIDEGATE_WORKER__KV__BLOCKS: .*equal to 0"),
        ({"TIDEGATE_WORKER__MEMORY__HARD_GIB": "2 GB"}, "MEMORY__HARD_GIB: .*valid number"),
        ({"TIDEGATE_WORKER__PLAIN": "secret"}, "invalid: TIDEGATE_WORKER__PLAIN: expected JSON$"),
        (
            {"TIDEGATE_WORKER_PLAIN_TOKEN": "t", "TIDEGATE_WORKER__KV__BLOCKS": "x"},
            r"WORKER__PLAIN__TOKEN\?; TIDEGATE_WORKER__KV__BLOCKS: .*valid integer",
        ),
    ],
)
def test_a_mistake_is_answered_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, stated: dict[str, str], said: str
) -> None:
    for name, value in stated.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        read_settings()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TIDEGATE_SLOT_MEMORY_HARD_GB", "x", r"did you mean TIDEGATE_SLOT__MEMORY__HARD_GIB\?"),
        ("TIDEGATE_SLOT__PRECISION", "x", r"did you mean TIDEGATE_SLOT__PRECISIONS\?"),
        ("TIDEGATE_SLOT__PRECISIONS", "fp8", "TIDEGATE_SLOT__PRECISIONS: expected JSON"),
        ("TIDEGATE_SLOT__PRECISIONS", '{"flux": "x"}', "SLOT__PRECISIONS: flux: .*'nf4'"),
        ("TIDEGATE_SLOT__FOLDERS", '{"flex": "x"}', "SLOT__FOLDERS: flex: not a setting; see docs"),
    ],
)
def test_a_mistake_in_the_slot_models_is_too(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"the slot's settings are invalid: .*{said}"):
        slot.read_clip_settings()


def test_what_kubernetes_adds_for_a_service_of_that_name_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_8001_TCP_ADDR"):
        monkeypatch.setenv(f"TIDEGATE_WORKER_{name}", "x")
    read_settings()
