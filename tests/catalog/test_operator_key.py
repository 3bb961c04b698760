"""The operators' key of a service without an admin's: kept for its own user alone (OR-25)."""

import os
from pathlib import Path

import pytest

from catalog.operator_key import access, keep_key, key_file

HOST, PORT = "127.0.0.1", 8080
URL = "http://127.0.0.1:8080"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return key_file(tmp_path, HOST, PORT)


def test_a_key_is_made_up_for_its_owner_alone_and_found_by_the_address(
    tmp_path: Path, path: Path
) -> None:
    before = os.umask(0)
    try:
        key = keep_key(path)
    finally:
        os.umask(before)
    assert len(key) >= 43
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert access(URL + "/", tmp_path) == (URL + "/", key)
    assert keep_key(path) == key, "one that was killed has left it"
    assert keep_key(key_file(tmp_path, HOST, PORT + 1)) != key


@pytest.mark.parametrize("content", ["", "short", "ünreadable" * 9])
def test_what_is_no_key_is_replaced(path: Path, content: str) -> None:
    keep_key(path)
    path.write_text(content)
    assert keep_key(path).isascii() and len(path.read_text()) >= 43


def test_a_key_that_others_could_read_is_none(tmp_path: Path, path: Path) -> None:
    key = keep_key(path)
    path.chmod(0o640)
    assert access(URL, tmp_path).key == ""
    assert keep_key(path) != key


def test_a_folder_that_others_may_write_to_has_none(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="belong to this user"):
        keep_key(path)


@pytest.mark.parametrize(
    ("listens_on", "url", "asked"),
    [
        ("0.0.0.0", "http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("::", "http://[::1]:8080", "http://[::1]:8080"),
        ("localhost", "http://localhost:8080", "http://localhost:8080"),
        ("localhost", "http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        # [::1]:8080 may be somebody else's.
        ("127.0.0.1", "http://LOCALHOST:8080/v2", "http://127.0.0.1:8080/v2"),
    ],
)
def test_the_address_may_be_spelled_as_clients_do(
    tmp_path: Path, listens_on: str, url: str, asked: str
) -> None:
    key = keep_key(key_file(tmp_path, listens_on, PORT))
    assert access(url, tmp_path) == (asked, key)


@pytest.mark.parametrize(
    "url", ["http://10.0.0.7:8080", "http://[::1]:8080", "http://127.0.0.1:81", "http://x:y", "no"]
)
def test_no_other_address_is_sent_it(tmp_path: Path, path: Path, url: str) -> None:
    keep_key(path)
    assert access(url, tmp_path) == (url, "")
