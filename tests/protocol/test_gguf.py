"""Which file of a model in GGUF is opened, and what belongs to it."""

from pathlib import Path

import pytest

from protocol.gguf import find_gguf, is_gguf, parts_of
from tests.support.gguf import write_gguf
from worker.models.folder import model_name


def test_a_checkpoint_next_to_it_comes_first(tmp_path: Path) -> None:
    assert is_gguf(tmp_path / "a.gguf") and not is_gguf(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert is_gguf(tmp_path)
    (tmp_path / "config.json").touch()
    assert not is_gguf(tmp_path)


def test_a_model_is_found_by_file_or_by_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.gguf file"):
        find_gguf(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        find_gguf(tmp_path / "nothing")
    one = write_gguf(tmp_path / "one.gguf", {})
    assert find_gguf(one) == find_gguf(tmp_path) == one
    write_gguf(tmp_path / "two.gguf", {})
    with pytest.raises(ValueError, match=r"2 models in GGUF \(one\.gguf, two\.gguf\)"):
        find_gguf(tmp_path)


def test_the_parts_of_a_model_are_one_model(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        write_gguf(part, {})
    assert find_gguf(tmp_path) == find_gguf(parts[2]) == parts[0]
    assert parts_of(parts[0]) == parts
    assert model_name(parts[0]) == "big" and model_name(tmp_path / "a.b.gguf") == "a.b"
    parts[1].unlink()
    with pytest.raises(ValueError, match=r"00002-of-00003\.gguf is missing"):
        parts_of(parts[0])
