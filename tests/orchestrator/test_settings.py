"""Settings are read once, and a bad value says which one it is."""

from pathlib import Path

import pytest

from orchestrator.settings import InvalidSettings, load_settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_environment_over_file_over_default(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "tidegate.toml").write_text('port = 9001\nqueue_size = 7\ninstances = ["a:1"]\n')
    monkeypatch.setenv("TIDEGATE_PORT", "9002")
    settings = load_settings()
    assert (settings.port, settings.queue_size, settings.instances) == (9002, 7, ("a:1",))
    assert load_settings(port="9003").port == 9003


def test_instances_are_a_list_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_INSTANCES", "127.0.0.1:8001, [::1]:8002,gpu-3:8001")
    assert load_settings().instances == ("127.0.0.1:8001", "[::1]:8002", "gpu-3:8001")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "eighty"),
        ("PORT", "70000"),
        ("INSTANCES", "localhost"),
        ("INSTANCES", "localhost:0"),
        ("INSTANCES", "a:1,a:1"),
        ("INSTANCES", ""),
        ("DEFAULT_DEADLINE_S", "-1"),
        ("QUEUE_SIZE", "-2"),
        ("TOKEN", "two words"),
        ("LOG_LEVEL", "loud"),
        ("SUSPECT_AFTER_S", "9"),
    ],
)
def test_a_bad_value_fails_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TIDEGATE_{name}", value)
    with pytest.raises(InvalidSettings, match=f"TIDEGATE_{name}"):
        load_settings()


@pytest.mark.parametrize("address", ["http://localhost:8001", "grpc://a:1", "a/b:1", "a:1/"])
def test_an_instance_is_no_url(address: str) -> None:
    with pytest.raises(InvalidSettings, match="without a scheme or path"):
        load_settings(instances=address)


def test_or12_off_loopback_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """OR-12."""
    with pytest.raises(InvalidSettings, match="TIDEGATE_TOKEN"):
        load_settings(host="0.0.0.0")
    monkeypatch.setenv("TIDEGATE_TOKEN", "secret")
    settings = load_settings(host="0.0.0.0")
    assert "secret" not in repr(settings)
    for host in ("localhost", "127.0.0.2", "::1"):
        monkeypatch.delenv("TIDEGATE_TOKEN", raising=False)
        assert load_settings(host=host).token is None


def test_a_file_with_an_unknown_setting_or_no_toml(elsewhere: Path) -> None:
    (elsewhere / "tidegate.toml").write_text("prot = 9001\n")
    with pytest.raises(InvalidSettings, match="prot"):
        load_settings()
    (elsewhere / "tidegate.toml").write_text("port = = 1\n")
    with pytest.raises(InvalidSettings, match=r"tidegate\.toml"):
        load_settings()
