"""Where state goes: next to a checkout, and never into an installed package."""

from pathlib import Path

import pytest

from catalog import paths


def test_an_installed_wheel_keeps_it_with_the_users_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path / "site-packages" / "tidegate" / "_runtime")
    monkeypatch.delenv("TIDEGATE_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert paths.state_dir() == Path("/home/somebody/.local/share/tidegate")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert paths.state_dir() == Path("/data/tidegate")
    monkeypatch.setenv("TIDEGATE_HOME", "/mine")
    assert paths.state_dir() == Path("/mine")


def test_services_on_one_port_of_different_hosts_have_logs_of_their_own(tmp_path: Path) -> None:
    hosts = ("127.0.0.1", "127.0.0.2", "localhost", "::1", "fe80::1%eth0", "../x")
    folders = {paths.log_dir(tmp_path, host, 8080) for host in hosts}
    assert len(folders) == len(hosts)
    assert {folder.parent for folder in folders} == {tmp_path / "logs"}
    assert paths.log_dir(tmp_path, "127.0.0.1", 8080).name == "127.0.0.1-8080"
